"""`kvrelay serve` under signals: SIGHUP reads the configuration again, SIGTERM drains, a second one ends at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvrelay.edge.http.server import Exchange
from tests.cli.serving import asking, eventually, serving, write_config
from tests.edge.gateway.scripted import EVENT_STREAM, ScriptedWorker, chunk, hang, token_body

ONE, TWO = "processes = 1", "processes = 2"
both = pytest.mark.parametrize("processes", [ONE, TWO])


class Streaming(ScriptedWorker):
    """Begins every answer and leaves it open."""

    def __init__(self, name: str) -> None:
        self.streams: list[Exchange] = []
        super().__init__(name, self._begin)

    def _begin(self, exchange: Exchange) -> None:
        exchange.start(200, (EVENT_STREAM,))
        exchange.write(chunk("one"))
        self.streams.append(exchange)

    def finish(self) -> None:
        for stream in self.streams:
            stream.write(chunk("two"))
            stream.finish()


@pytest.fixture
async def worker() -> AsyncIterator[Streaming]:
    worker = Streaming("a")
    await worker.start()
    yield worker
    await worker.stop()


@pytest.fixture
async def other() -> AsyncIterator[ScriptedWorker]:
    worker = ScriptedWorker("b")
    await worker.start()
    yield worker
    await worker.stop()


@both
async def test_a_reload_changes_workers_and_policy_under_live_streams(
    tmp_path: Path, worker: Streaming, other: ScriptedWorker, processes: str
) -> None:
    file = write_config(tmp_path / "k.toml", worker, gateway=processes)
    async with serving(file) as served, asking(served) as client:
        await client.until_routable("a")
        streams = [asyncio.create_task(client.post(token_body(stream=True))) for _ in range(4)]
        await eventually(lambda: len(worker.streams) == 4)
        write_config(file, other, gateway=f'{processes}\npolicy = "round_robin"')
        served.signal(signal.SIGHUP)
        await served.has_said("configuration 2 is in force; open requests go on")
        await client.until_routable("b")
        for _ in range(4):
            status, _, headers = await client.post(token_body())
            assert (status, headers["x-kvrelay-worker"]) == (200, "b")
            assert headers["x-kvrelay-route-reason"] == "round_robin"
        worker.finish()
        for status, body, _ in await asyncio.gather(*streams):
            assert (status, body) == (200, chunk("one") + chunk("two"))
        _, listed = await client.admin("GET", "/admin/receipts")
        assert [each["status"] for each in listed["receipts"]] == ["ok"] * 8


@both
async def test_a_bad_file_is_refused_whole_and_said(tmp_path: Path, worker: Streaming, processes: str) -> None:
    file = write_config(tmp_path / "k.toml", worker, gateway=processes)
    async with serving(file) as served, asking(served) as client:
        await client.until_routable("a")
        write_config(file, gateway=f'{processes}\npolicy = "random"', more="[helth]\ninterval_s = 1")
        served.signal(signal.SIGHUP)
        await served.has_said(
            f"error: unknown key `helth` (from {file})\n  known here: `gateway`, `workers`, `health`, `affinity`, "
        )
        await served.has_said("warning: nothing was changed, configuration 1 stays in force\n")
        _, status = await client.admin("GET", "/admin/status")
        assert status["config"]["generation"] == 1
        assert status["config"]["last_error"] == f"unknown_key: helth (from {file})"
        assert status["policy"] == "cache_load" and [each["name"] for each in status["workers"]] == ["a"]
        write_config(file, worker, gateway=f'{processes}\npolicy = "random"', more="[receipts]\nkeep = 3")
        served.signal(signal.SIGHUP)
        await served.has_said(
            "configuration 2 is in force; open requests go on\n"
            "warning: changed in the file, but not while running: `receipts.keep`\n"
            "hint: restart to change them\n"
        )
        _, status = await client.admin("GET", "/admin/status")
        assert (status["config"]["last_error"], status["policy"]) == (None, "random")
        assert status["config"]["needs_restart"] == ["receipts.keep"]


@both
@pytest.mark.covers("OP-11")
async def test_sigterm_drains_and_ends_with_0(tmp_path: Path, worker: Streaming, processes: str) -> None:
    file = write_config(tmp_path / "k.toml", worker, gateway=processes)
    async with serving(file) as served, asking(served) as client:
        await client.until_routable("a")
        streams = [asyncio.create_task(client.post(token_body(stream=True))) for _ in range(4)]
        await eventually(lambda: len(worker.streams) == 4)
        served.signal(signal.SIGTERM)
        await served.has_said("draining: no new requests")
        await client.until_draining()
        for _ in range(4):
            assert await client.get("/ready") == (503, b'{"status":"draining"}')
            assert (await client.get("/health"))[0] == 200
            status, _, headers = await client.post(token_body())
            assert (status, headers["x-kvrelay-reason"]) == (503, "gateway_draining")
        _, listed = await client.admin("GET", "/admin/receipts")
        assert [each["failure_reason"] for each in listed["receipts"]] == ["gateway_draining"] * 4
        worker.finish()
        assert {(status, body) for status, body, _ in await asyncio.gather(*streams)} == {
            (200, chunk("one") + chunk("two"))
        }
        assert await served.ended() == 0


@both
@pytest.mark.covers("OP-11")
async def test_a_second_signal_cuts_what_is_open_and_the_receipts_say_so(
    tmp_path: Path, other: ScriptedWorker, processes: str
) -> None:
    other.script = hang
    receipts = tmp_path / "receipts.jsonl"
    file = write_config(tmp_path / "k.toml", other, gateway=processes, more=f'[receipts]\npath = "{receipts}"')
    async with serving(file) as served, asking(served) as client:
        await client.until_routable("b")
        waiting = [asyncio.create_task(client.post(token_body())) for _ in range(4)]
        await eventually(lambda: len(other.requests) == 4)
        served.signal(signal.SIGINT)
        await served.has_said("draining: no new requests")
        await client.until_draining()
        served.signal(signal.SIGTERM)
        for status, _, headers in await asyncio.gather(*waiting):
            assert (status, headers["x-kvrelay-reason"]) == (503, "gateway_stopped")
        assert await served.ended() == 0
        assert "warning: 4 open requests were cut; their receipts say so" in served.said()
    lines = receipts.read_text().splitlines()
    assert len(lines) == 4 and all('"failure_reason":"gateway_stopped"' in line for line in lines)


@both
@pytest.mark.covers("OP-11")
async def test_what_outlives_the_grace_is_cut(tmp_path: Path, worker: Streaming, processes: str) -> None:
    file = write_config(tmp_path / "k.toml", worker, gateway=f"{processes}\n[gateway.drain]\ngrace_s = 0.3")
    async with serving(file) as served, asking(served) as client:
        await client.until_routable("a")
        streaming = asyncio.create_task(client.post(token_body(stream=True)))
        await eventually(lambda: worker.streams)
        served.signal(signal.SIGTERM)
        with pytest.raises(Exception, match="not completed"):
            await streaming
        assert await served.ended() == 0
        assert "warning: 1 open requests were cut; their receipts say so" in served.said()
