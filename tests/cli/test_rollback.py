"""`kvrelay rollback` against a real gateway."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from typing import Any, cast

import pytest

from kvrelay.edge.connectors.vllm.kv.records import Records
from kvrelay.edge.connectors.vllm.kv.report import ReportServer
from kvrelay.edge.connectors.vllm.kv.switch import Switch
from tests.edge.gateway.scripted import ScriptedWorker, client_of, receipts, running, token_body

COMMAND = [sys.executable, "-m", "kvrelay.cli.main", "rollback"]


async def call(*arguments: str) -> tuple[int | None, str, str]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*COMMAND, *arguments, stdout=pipe, stderr=pipe)
    out, said = await process.communicate()
    return process.returncode, out.decode(), said.decode()


@pytest.fixture
def connector() -> Iterator[tuple[str, Switch]]:
    """The port of a KV connector inside a worker, and its switch."""
    switch = Switch()
    server = ReportServer("127.0.0.1:0", Records(), cast(Any, None), switch, settings={})
    yield f"http://127.0.0.1:{server.port}", switch
    server.close()


@pytest.mark.covers("RT-30")
async def test_one_command_goes_back_to_round_robin() -> None:
    workers = [ScriptedWorker(name) for name in "ab"]
    async with running(*workers) as gateway, client_of(gateway) as client:
        status, out, _ = await call("--router", gateway.admin_url, "--policy-only", "--json")
        assert status == 0 and json.loads(out) == {"before": "cache_load", "policy": "round_robin", "sharing": []}
        for _ in range(4):
            await client.post(token_body())
        assert [len(worker.requests) for worker in workers] == [2, 2]
        assert {receipt.policy for receipt in receipts(gateway)} == {"round_robin"}


async def test_workers_leave_their_shared_tier_alone_and_the_way_forward_is_told(
    connector: tuple[str, Switch],
) -> None:
    url, switch = connector
    worker = ScriptedWorker("a")
    await worker.start()
    entry = {"name": "a", "url": worker.url, "adapter": "vllm", "kv_report": url}
    async with running(worker, workers=[entry]) as gateway, client_of(gateway) as client:
        status, out, said = await call("--router", gateway.admin_url)
        assert status == 0 and not switch.on
        assert out == (
            f"{gateway.admin_url} routes by round_robin from now on (before: cache_load)\na: shared tier left alone\n"
        )
        assert f"-X PUT {gateway.admin_url}/admin/sharing -d '{{\"on\": true}}'" in said
        told = {"workers": [{"worker": "a", "sharing": "off", "why": None}]}
        assert await client.admin("GET", "/admin/sharing") == (200, told)
        assert (await client.admin("PUT", "/admin/sharing", {"on": True}))[0] == 200 and switch.on
        assert (await client.admin("PUT", "/admin/sharing", {"on": "no"}))[0] == 400 and switch.on


async def test_a_worker_of_which_it_is_not_known_is_named_and_the_exit_says_so() -> None:
    async with running(ScriptedWorker("a")) as gateway:
        status, out, said = await call("--router", gateway.admin_url, "--json")
        assert status == 3 and json.loads(out)["policy"] == "round_robin"
        assert json.loads(out)["sharing"][0]["why"].startswith("no `kv_report` is set for it")
        assert "whether a still load KV from a shared tier is not known" in said and "--policy-only" in said


async def test_a_gateway_that_is_not_there_is_named() -> None:
    status, out, said = await call("--router", "http://127.0.0.1:9")
    assert status == 2 and not out and "nothing was changed: http://127.0.0.1:9" in said
