"""`kvrelay serve` with several processes on one port: one gateway to whoever asks, and to whoever looks at it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from kvrelay.cli.main import app
from kvrelay.edge.observe.receipt_file import read_receipts
from kvrelay.edge.observe.ui.picture import FLOW
from tests.cli.serving import Asker, asking, eventually, serving, write_config
from tests.edge.gateway.scripted import ScriptedWorker, hang, token_body

PROCESSES = 2
GATEWAY = f"processes = {PROCESSES}"


@pytest.fixture
async def workers() -> AsyncIterator[list[ScriptedWorker]]:
    workers = [ScriptedWorker(name) for name in "ab"]
    for worker in workers:
        await worker.start()
    yield workers
    for worker in workers:
        await worker.stop()


def process_of(headers: dict[str, str]) -> str:
    """Ids that a gateway makes begin with a word of its process."""
    return headers["x-kvrelay-request-id"].rpartition("-")[0]


async def ask_every_process(client: Asker, *, at_least: int = 12, **headers: str) -> list[dict[str, str]]:
    """Requests on new connections until each process has had one; the headers of all answers."""
    answers: list[dict[str, str]] = []
    async with asyncio.timeout(30):
        while len(answers) < at_least or len({process_of(each) for each in answers}) < PROCESSES:
            status, body, answer = await client.post(token_body(), **headers)
            assert status == 200, body
            answers.append(answer)
    return answers


async def samples(client: Asker) -> dict[tuple[str, tuple[str, ...]], float]:
    _, page = await client.admin("GET", "/metrics")
    families = text_string_to_metric_families(page)
    return {(s.name, tuple(sorted(s.labels.values()))): s.value for family in families for s in family.samples}


async def pids(client: Asker) -> list[int]:
    _, status = await client.admin("GET", "/admin/status")
    return [process["pid"] for process in status["processes"] if process["ready"]]


async def until_all_ready(client: Asker, *, restarts: int) -> None:
    async with asyncio.timeout(60):
        while True:
            _, status = await client.admin("GET", "/admin/status")
            known = status.get("processes", ())
            if sum(p["restarts"] for p in known) == restarts and all(p["ready"] and p["answers"] for p in known):
                return
            await asyncio.sleep(0.1)


@pytest.mark.covers("OB-05")
async def test_the_live_page_and_tasks_are_of_all_processes(tmp_path: Path, workers: list[ScriptedWorker]) -> None:
    file = write_config(tmp_path / "k.toml", *workers, gateway=GATEWAY, more="[observe]\ntask_idle_s = 2.0")
    async with serving(file) as served, asking(served) as client:
        await client.until_routable("a", "b")
        sent = len(await ask_every_process(client, **{"x-session-id": "one"}))
        status, page = await client.admin("GET", "/ui")
        assert status == 200 and "<title>kvrelay</title>" in page
        picture = await first_picture(served.admin_url)
        assert picture["gateway"]["processes"] == PROCESSES
        assert [worker["name"] for worker in picture["workers"]] == ["a", "b"]
        assert picture["statuses"] == {"ok": sent} and len(picture["flow"]) == min(sent, FLOW)
        status, told = await client.admin("GET", f"/ui/receipts/{picture['flow'][0]['request_id']}")
        assert status == 200 and told["text"].startswith("Request ")

        async with asyncio.timeout(30):
            while not (counted := await samples(client))["kvrelay_tasks_total", ("ok",)]:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        assert counted["kvrelay_session_wall_seconds_count", ()] == 1, "one session, whatever process had its requests"
        assert (await client.admin("GET", "/process/tasks"))[0] == 404, "between the group and its processes"


async def first_picture(admin_url: str) -> Any:
    async with aiohttp.ClientSession() as client, client.get(f"{admin_url}/ui/stream") as stream:
        return json.loads((await stream.content.readline()).removeprefix(b"data: "))


@pytest.mark.covers("RC-01", "RC-11", "RC-18")
async def test_requests_of_all_processes_are_counted_and_found_in_one_place(
    tmp_path: Path, workers: list[ScriptedWorker]
) -> None:
    receipts = tmp_path / "receipts.jsonl"
    file = write_config(tmp_path / "k.toml", *workers, gateway=GATEWAY, more=f'[receipts]\npath = "{receipts}"')
    async with serving(file) as served, asking(served) as client:
        await client.until_routable("a", "b")
        answers = await ask_every_process(client)
        ids = [answer["x-kvrelay-request-id"] for answer in answers]
        assert len(set(ids)) == len(ids)
        for request_id in ids:
            status, receipt = await client.admin("GET", f"/admin/receipts/{request_id}")
            assert (status, receipt["request_id"], receipt["status"]) == (200, request_id, "ok")
        _, listed = await client.admin("GET", f"/admin/receipts?limit={len(ids)}")
        assert [each["request_id"] for each in listed["receipts"]] == ids[::-1], "newest first, over all processes"
        _, shorter = await client.admin("GET", "/admin/receipts?limit=2")
        assert [each["request_id"] for each in shorter["receipts"]] == ids[:-3:-1]
        assert (await client.admin("GET", "/admin/receipts/none"))[0] == 404
        assert (await client.admin("GET", "/admin/receipts?limit=x"))[0] == 400
        counted = await samples(client)
        requests = {key: value for key, value in counted.items() if key[0] == "kvrelay_requests_total"}
        assert sum(requests.values()) == len(ids)
        assert counted["kvrelay_e2e_seconds_count", ()] == len(ids)
        assert counted["kvrelay_e2e_seconds_bucket", ("+Inf",)] == len(ids)
        assert counted["kvrelay_worker_up", ("a",)] == 1
        assert counted["kvrelay_active_requests", ("a",)] == 0
        assert [counted["kvrelay_process_up", (str(number),)] for number in range(PROCESSES)] == [1.0] * PROCESSES
        _, status = await client.admin("GET", "/admin/status")
        assert (status["gateway"]["url"], status["gateway"]["pid"]) == (served.url, served.process.pid)
        assert {each["name"] for each in status["workers"]} == {"a", "b"}
        assert len({process["pid"] for process in status["processes"]}) == PROCESSES
        (target,) = status["workers"][0]["targets"]
        assert target["active_requests"] == 0
        served.signal(signal.SIGTERM)
        assert await served.ended() == 0
    written = list(read_receipts(receipts))
    assert sorted(receipt.request_id for receipt in written) == sorted(ids)
    assert len({receipt.manifest_digest for receipt in written}) == 1
    assert len({receipt.prefix_fingerprint for receipt in written}) == 1, "equal prefixes do not show as equal"
    tailed = CliRunner().invoke(app, ["receipts", "tail", str(receipts), "-n", "2"])
    assert [line.split()[0] for line in tailed.stdout.splitlines()] == [each.request_id for each in written[-2:]]
    assert CliRunner().invoke(app, ["receipts", "explain", f"{receipts}:1"]).exit_code == 0


@pytest.mark.covers("RT-06")
async def test_a_session_has_one_worker_in_all_processes(tmp_path: Path, workers: list[ScriptedWorker]) -> None:
    file = write_config(tmp_path / "k.toml", *workers, gateway=f'{GATEWAY}\npolicy = "sticky"')
    async with serving(file) as served, asking(served) as client:
        await client.until_routable("a", "b")
        homes = {}
        for session in ("s-1", "s-2", "s-3", "s-4"):
            answers = await ask_every_process(client, at_least=6, x_session_id=session)
            (homes[session],) = {answer["x-kvrelay-worker"] for answer in answers}
        _, listed = await client.admin("GET", "/admin/sessions")
        assert {each["session_id"]: each["worker"] for each in listed["sessions"]} == homes
        assert (await samples(client))["kvrelay_sessions", ()] == 4
        assert await client.admin("DELETE", "/admin/sessions/s-1") == (200, {"closed": "s-1"})
        _, listed = await client.admin("GET", "/admin/sessions")
        assert {each["session_id"] for each in listed["sessions"]} == {"s-2", "s-3", "s-4"}
        assert (await client.admin("DELETE", "/admin/sessions/s-1"))[0] == 404


@pytest.mark.covers("RT-30")
async def test_a_change_is_in_force_in_all_processes_when_it_is_answered(
    tmp_path: Path, workers: list[ScriptedWorker]
) -> None:
    a, b = workers
    file = write_config(tmp_path / "k.toml", a, gateway=GATEWAY)
    async with serving(file) as served, asking(served) as client:
        await client.until_routable("a")
        status, policy = await client.admin("PUT", "/admin/policy", {"policy": "round_robin"})
        assert (status, policy["policy"]) == (200, "round_robin")
        assert {each["x-kvrelay-route-reason"] for each in await ask_every_process(client)} == {"round_robin"}
        status, answer = await client.admin("PUT", "/admin/policy", {"policy": "cache_lod"})
        assert (status, "known: cache_load" in answer["error"]["message"]) == (400, True)
        added = {"url": b.url, "name": "b", "adapter": "vllm"}
        assert (await client.admin("POST", "/admin/workers", added))[0] == 201
        assert (await client.admin("POST", "/admin/workers", added))[0] == 409
        await client.until_routable("a", "b")
        assert (await client.admin("POST", "/admin/workers/a/drain"))[0] == 200
        assert {each["x-kvrelay-worker"] for each in await ask_every_process(client)} == {"b"}
        assert (await client.admin("GET", "/admin/workers/a"))[1]["draining"] is True
        assert (await client.admin("POST", "/admin/workers/a/resume"))[0] == 200
        assert (await client.admin("POST", "/admin/workers/a/resync"))[0] == 200
        assert (await client.admin("POST", "/admin/workers/c/drain"))[0] == 404
        bound = {"url": "http://127.0.0.1:9", "events": "bind:tcp://127.0.0.1:5557"}
        status, answer = await client.admin("POST", "/admin/workers", bound)
        assert status == 400 and "only one of them could bind that address" in answer["error"]["message"]
        for body in ({"url": "ftp://x"}, {"url": b.url, "api_key_file": "/etc/passwd"}, []):
            assert (await client.admin("POST", "/admin/workers", body))[0] == 400
        assert (await client.admin("DELETE", "/admin/workers/b"))[0] == 200
        assert {each["x-kvrelay-worker"] for each in await ask_every_process(client)} == {"a"}
        status, match = await client.admin("POST", "/admin/match", token_body(64))
        assert (status, match["chosen"], match["prompt_tokens"]) == (200, "a", 64)
        status, answer = await client.admin("GET", "/admin/statsu")
        assert status == 404 and "no such path: `/admin/statsu`" in answer["error"]["message"]
        assert (await client.admin("PUT", "/process/config", {}))[0] == 404


async def test_a_process_that_dies_is_replaced_by_one_that_knows_what_was_changed(
    tmp_path: Path, workers: list[ScriptedWorker]
) -> None:
    a, b = workers
    file = write_config(tmp_path / "k.toml", a, gateway=f'{GATEWAY}\npolicy = "sticky"')
    async with serving(file) as served, asking(served) as client:
        await client.until_routable("a")
        await client.admin("POST", "/admin/workers", {"url": b.url, "name": "b", "adapter": "vllm"})
        await client.until_routable("a", "b")
        bound = (await ask_every_process(client, x_session_id="s"))[-1]["x-kvrelay-worker"]
        await client.admin("PUT", "/admin/policy", {"policy": "sticky_load"})
        before = await samples(client)
        (victim, *_) = await pids(client)
        os.kill(victim, signal.SIGKILL)
        await served.has_said("died with status -9, its open requests are lost")
        for _ in range(10):
            assert (await client.get("/ready"))[0] == 200, "the port is served all the time"
        await until_all_ready(client, restarts=1)
        assert victim not in await pids(client)
        after = await samples(client)
        fallen = {
            key: (value, after.get(key))
            for key, value in before.items()
            if key[0].endswith(("_total", "_count", "_bucket", "_sum")) and after.get(key, 0) < value
        }
        assert fallen == {}, "counters may never fall"
        assert after["kvrelay_process_restarts_total", ()] == 1
        assert (await client.admin("GET", "/admin/policy"))[1]["policy"] == "sticky_load"
        _, status = await client.admin("GET", "/admin/status")
        assert {each["name"] for each in status["workers"]} == {"a", "b"}
        answers = await ask_every_process(client, x_session_id="s")
        assert {each["x-kvrelay-worker"] for each in answers} == {bound}, "the new process learned of the session"


async def test_a_process_that_is_told_to_end_finishes_its_streams_while_the_others_serve(
    tmp_path: Path, workers: list[ScriptedWorker]
) -> None:
    a, b = workers
    a.script = hang
    file = write_config(tmp_path / "k.toml", a, gateway=GATEWAY)
    async with serving(file) as served, asking(served) as client:
        await client.until_routable("a")
        held = [asyncio.create_task(client.post(token_body())) for _ in range(12)]
        await eventually(lambda: len(a.requests) == 12)
        await client.admin("POST", "/admin/workers", {"url": b.url, "name": "b", "adapter": "vllm"})
        await client.until_routable("a", "b")
        await client.admin("POST", "/admin/workers/a/drain")
        (told, *_) = await pids(client)
        os.kill(told, signal.SIGTERM)
        await client.until_draining(any)
        for _ in range(12):
            assert (await client.post(token_body()))[0] == 200, "it was sent to the process that leaves"
        for exchange in a.requests:
            exchange.respond(200, (), b"{}")
        assert {status for status, _, _ in await asyncio.gather(*held)} == {200}
        await served.has_said(f"pid={told}: ended as it was told")
        await until_all_ready(client, restarts=1)
        assert {each["x-kvrelay-worker"] for each in await ask_every_process(client)} == {"b"}


async def test_a_process_that_does_not_take_a_change_is_replaced(tmp_path: Path, workers: list[ScriptedWorker]) -> None:
    """It hangs while the policy is switched: it is not waited for, and what takes its place has the new policy."""
    file = write_config(tmp_path / "k.toml", *workers, gateway=GATEWAY)
    async with serving(file) as served, asking(served) as client:
        await client.until_routable("a", "b")
        stopped = (await pids(client))[-1]
        os.kill(stopped, signal.SIGSTOP)
        assert (await client.admin("PUT", "/admin/policy", {"policy": "random"}))[0] == 200
        await served.has_said("is started again")
        await until_all_ready(client, restarts=1)
        assert {each["x-kvrelay-route-reason"] for each in await ask_every_process(client)} == {"random"}


async def test_nothing_is_left_when_the_group_is_killed(
    tmp_path: Path, workers: list[ScriptedWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    file = write_config(tmp_path / "k.toml", *workers, gateway=GATEWAY)
    async with serving(file) as served, asking(served) as client:
        processes = await pids(client)
        assert len(list(folder.glob("kvrelay-*/hub"))) == 1
        served.signal(signal.SIGKILL)
        await served.ended()
        await eventually(lambda: not any(map(_is_running, processes)))
        assert list(folder.iterdir()) == []


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_load_of_one_process_is_seen_by_the_others(tmp_path: Path, workers: list[ScriptedWorker]) -> None:
    """Held requests of several processes spread evenly: each process knows what the others have sent."""
    for worker in workers:
        worker.script = lambda exchange: None
    file = write_config(tmp_path / "k.toml", *workers, gateway=f'{GATEWAY}\npolicy = "least_load"')
    async with serving(file) as served, asking(served) as client:
        await client.until_routable("a", "b")
        held: list[asyncio.Task[Any]] = []
        for number in range(1, 13):
            held.append(asyncio.create_task(client.post(token_body())))
            await eventually(lambda number=number: sum(len(worker.requests) for worker in workers) == number)
            await asyncio.sleep(0.15)  # several times as long as the processes take to tell each other
        assert [len(worker.requests) for worker in workers] == [6, 6]
        _, status = await client.admin("GET", "/admin/status")
        assert [each["targets"][0]["active_requests"] for each in status["workers"]] == [6, 6]
        assert status["live_requests"] == status["gateway"]["open_requests"] == 12
        for worker in workers:
            for exchange in worker.requests:
                exchange.respond(200, (), b"{}")
        await asyncio.gather(*held)


async def test_a_second_gateway_does_not_join_the_first_on_its_port(
    tmp_path: Path, workers: list[ScriptedWorker]
) -> None:
    file = write_config(tmp_path / "k.toml", *workers, gateway="processes = 2")
    async with serving(file) as served:
        port = served.url.rpartition(":")[2]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvrelay.cli.main", "serve", "-c", str(file), "--port", port),
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await process.communicate()
        assert process.returncode == 2
        assert said.decode() == (
            f"error: the gateway could not start: 127.0.0.1:{port} is in use by another process\n"
            "hint: name other ports with `--port` and `--admin-port`; 0 takes free ones\n"
        )


async def test_a_process_that_cannot_start_ends_the_start(tmp_path: Path) -> None:
    absent = tmp_path / "absent.json"
    file = write_config(tmp_path / "k.toml", gateway="processes = 2", more=f'[tokens]\ntokenizer = "{absent}"')
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvrelay.cli.main", "serve", "-c", str(file)),
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, said = await process.communicate()
    assert process.returncode == 2 and "error: the gateway could not start" in said.decode(), said.decode()
    assert str(absent) in said.decode()
