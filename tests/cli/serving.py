"""`kvrelay serve` as a process of its own, in front of scripted workers of the test."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from tests.edge.gateway.scripted import ScriptedWorker

START_S = 60.0


class Served:
    """The running command: what it said it listens on, and what it says on stderr."""

    def __init__(self, process: asyncio.subprocess.Process, ready: dict[str, Any], log: Path) -> None:
        self.process = process
        self.url: str = ready["url"]
        self.admin_url: str = ready["admin_url"]
        self._log = log

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def said(self) -> str:
        return self._log.read_text()

    async def has_said(self, text: str) -> None:
        await eventually(lambda: text in self.said())

    async def ended(self) -> int:
        async with asyncio.timeout(START_S):
            return await self.process.wait()


async def eventually(condition: Any, within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110  other processes give no event
            await asyncio.sleep(0.02)


def write_config(file: Path, *workers: ScriptedWorker, gateway: str = "", more: str = "") -> Path:
    entries = "".join(f'[[workers]]\nname = "{w.name}"\nurl = "{w.url}"\nadapter = "vllm"\n' for w in workers)
    text = f"[gateway]\nport = 0\nadmin_port = 0\n{gateway}\n{entries}\n[health]\ninterval_s = 0.1\n{more}\n"
    file.write_text(text)
    return file


@asynccontextmanager
async def serving(config: Path, *arguments: str) -> AsyncIterator[Served]:
    log = config.with_suffix(".log")
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvrelay.cli.main", "serve", "-c", str(config), "--json", *arguments,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=stderr,
        )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            line = await process.stdout.readline()
        assert line, log.read_text()
        yield Served(process, msgspec.json.decode(line), log)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


class Asker:
    """Talks to both ports of a served gateway."""

    def __init__(self, served: Served, session: aiohttp.ClientSession) -> None:
        self._served = served
        self._session = session

    async def post(self, body: dict[str, Any], **headers: str) -> tuple[int, bytes, dict[str, str]]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self._session.post(f"{self._served.url}/v1/completions", json=body, headers=named) as response:
            return response.status, await response.read(), {k.lower(): v for k, v in response.headers.items()}

    async def get(self, path: str) -> tuple[int, bytes]:
        async with self._session.get(self._served.url + path) as response:
            return response.status, await response.read()

    async def admin(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        data = None if body is None else msgspec.json.encode(body)
        async with self._session.request(method, self._served.admin_url + path, data=data) as response:
            raw = await response.read()
            return response.status, msgspec.json.decode(raw) if "json" in response.content_type else raw.decode()

    async def until_routable(self, *names: str) -> None:
        async with asyncio.timeout(30):
            while True:
                _, answer = await self.admin("GET", "/admin/workers")
                if [each["name"] for each in answer["workers"] if each["routable"]] == list(names):
                    return
                await asyncio.sleep(0.05)

    async def until_draining(self, how_many: Callable[[Iterable[bool]], bool] = all) -> None:
        """In `all` processes or in `any`, of those that are there: one without open requests has ended by then."""
        async with asyncio.timeout(30):
            while True:
                _, status = await self.admin("GET", "/admin/status")
                there = [each for each in status.get("processes", [status["gateway"]]) if each.get("answers", True)]
                if how_many(each["draining"] for each in there):
                    return
                await asyncio.sleep(0.05)


@asynccontextmanager
async def asking(served: Served) -> AsyncIterator[Asker]:
    """Every request on a connection of its own, so that several gateway processes get some."""
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield Asker(served, session)
