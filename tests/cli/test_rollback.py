"""`kvrelay rollback` against a real gateway."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest

from tests.edge.gateway.scripted import ScriptedWorker, client_of, receipts, running, token_body

COMMAND = [sys.executable, "-m", "kvrelay.cli.main", "rollback"]


async def call(*arguments: str) -> tuple[int | None, str, str]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*COMMAND, *arguments, stdout=pipe, stderr=pipe)
    out, said = await process.communicate()
    return process.returncode, out.decode(), said.decode()


@pytest.mark.covers("RT-30")
async def test_one_command_goes_back_to_round_robin() -> None:
    workers = [ScriptedWorker(name) for name in "ab"]
    async with running(*workers) as gateway, client_of(gateway) as client:
        status, out, _ = await call("--router", gateway.admin_url, "--json")
        assert status == 0 and json.loads(out) == {"before": "cache_load", "policy": "round_robin"}
        for _ in range(4):
            await client.post(token_body())
        assert [len(worker.requests) for worker in workers] == [2, 2]
        assert {receipt.policy for receipt in receipts(gateway)} == {"round_robin"}


async def test_a_gateway_that_is_not_there_is_named() -> None:
    status, out, said = await call("--router", "http://127.0.0.1:9")
    assert status == 2 and not out and "nothing was changed: http://127.0.0.1:9" in said
