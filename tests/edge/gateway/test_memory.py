"""The gateway as a process: what goes through it does not stay in it, whoever is slow."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvrelay.edge.http.server import Exchange
from tests.edge.gateway.scripted import EVENT_STREAM, ScriptedWorker, until
from tests.edge.http.raw import connect

MIB = 2**20
ALLOWED_MIB = 24  # growth; system buffers are not ours, and one connection holds a few reads


class Served:
    """A gateway process in front of one worker of this process."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self._process = process
        self.port = port

    def rss_mib(self) -> float:
        with open(f"/proc/{self._process.pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB

    async def highest_rss_while(self, work: asyncio.Task[None]) -> float:
        highest = self.rss_mib()
        while not work.done():
            await asyncio.wait((work,), timeout=0.05)
            highest = max(highest, self.rss_mib())
        await work
        return highest


@asynccontextmanager
async def served(worker: ScriptedWorker) -> AsyncIterator[Served]:
    await worker.start()
    arguments = ["-m", "kvrelay.cli.main", "serve", "--port", "0", "--admin-port", "0", "--json"]
    process = subprocess.Popen(  # noqa: ASYNC220  starts in no time
        [sys.executable, *arguments, "--worker", worker.url], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)
        port = int(json.loads(line)["url"].rpartition(":")[2])
        async with asyncio.timeout(30):
            while b"200 OK" not in await _ready(port):  # noqa: ASYNC110  of another process
                await asyncio.sleep(0.05)
        yield Served(process, port)
    finally:
        process.kill()
        await asyncio.to_thread(process.communicate)
        await worker.stop()


async def _ready(port: int) -> bytes:
    reader, writer = await connect(port)
    writer.write(b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer


class Sink:
    """Counts an upload; `slow` until told otherwise, in which case it takes nothing."""

    def __init__(self, *, slow: bool) -> None:
        self.slow = slow
        self.taken_bytes = 0
        self.exchange: Exchange | None = None

    def __call__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        upload = exchange.upload
        assert upload is not None
        upload.on_data = self._take
        upload.on_end = lambda trailers: exchange.respond(200, (), b"%d taken" % self.taken_bytes)
        if not self.slow:
            upload.set_flow(True)

    def _take(self, data: bytes) -> None:
        self.taken_bytes += len(data)

    def go_on(self) -> None:
        assert self.exchange is not None and self.exchange.upload is not None
        self.exchange.upload.set_flow(True)


async def _send(writer: asyncio.StreamWriter, mib: int) -> None:
    piece = b"x" * MIB
    for _ in range(mib):
        writer.write(piece)
        await writer.drain()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("slow", [False, True])
async def test_an_upload_of_hundreds_of_megabytes_is_not_kept(slow: bool) -> None:
    mib = 300
    sink = Sink(slow=slow)
    async with served(ScriptedWorker("a", sink, holds_bytes=1000)) as gateway:
        await _small_upload(gateway.port)
        before = gateway.rss_mib()
        reader, writer = await connect(gateway.port)
        sink.taken_bytes = 0
        head = b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (mib * MIB)
        writer.write(head)
        sending = asyncio.create_task(_send(writer, mib))
        if slow:
            await until(lambda: sink.exchange is not None, within_s=30)
            await asyncio.wait((sending,), timeout=1)
            assert not sending.done(), "somebody took hundreds of megabytes for a worker that reads nothing"
            assert gateway.rss_mib() - before < ALLOWED_MIB
            sink.go_on()
        highest = await gateway.highest_rss_while(sending)
        async with asyncio.timeout(60):
            assert b"%d taken" % (mib * MIB) in await reader.readuntil(b"taken")
        assert highest - before < ALLOWED_MIB
        writer.close()


async def _small_upload(port: int) -> None:
    """Warms up the paths; short enough to be held."""
    reader, writer = await connect(port)
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readuntil(b"}]}")
    writer.close()


@pytest.mark.timeout(240)
async def test_an_answer_that_nobody_reads_is_not_kept() -> None:
    """The worker of this process writes only while it may, and is told to stop long before 200 MB are out."""
    wanted_bytes = 200 * MIB
    sent_bytes = 0
    stopped = asyncio.Event()

    def produce(exchange: Exchange) -> None:
        flowing = True

        def flow(wanted: bool) -> None:
            nonlocal flowing
            flowing = wanted
            if wanted:
                asyncio.get_running_loop().call_soon(go_on)
            else:
                stopped.set()

        def go_on() -> None:
            nonlocal sent_bytes
            while flowing and sent_bytes < wanted_bytes:
                exchange.write(b"x" * 65536)
                sent_bytes += 65536
            if sent_bytes >= wanted_bytes and not exchange.gone:
                exchange.finish()

        exchange.on_flow = flow
        exchange.start(200, (EVENT_STREAM,))
        go_on()

    async with served(ScriptedWorker("a", produce)) as gateway:
        await _small_upload(gateway.port)
        before = gateway.rss_mib()
        reader, writer = await connect(gateway.port)
        writer.write(b"GET /v1/stream HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        await asyncio.wait_for(stopped.wait(), 30)
        await asyncio.sleep(1)
        assert sent_bytes < wanted_bytes / 4
        assert gateway.rss_mib() - before < ALLOWED_MIB
        received = 0

        async def read_all() -> None:
            nonlocal received
            while data := await reader.read(MIB):
                received += len(data)

        highest = await gateway.highest_rss_while(asyncio.create_task(read_all()))
        assert received > wanted_bytes and highest - before < ALLOWED_MIB
        writer.close()
