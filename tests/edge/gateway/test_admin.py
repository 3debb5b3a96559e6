"""The admin port: what it shows, what it changes, whom it answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.core.model.units import RouteReason
from tests.edge.gateway.scripted import ScriptedWorker, client_of, receipts, running, token_body, until


@pytest.mark.covers("RT-30")
async def test_the_policy_switches_live() -> None:
    workers = [ScriptedWorker(name) for name in "ab"]
    async with running(*workers) as gateway, client_of(gateway) as client:
        assert (await client.admin("GET", "/admin/policy"))[1]["policy"] == "cache_load"
        status, now = await client.admin("PUT", "/admin/policy", {"policy": "round_robin"})
        assert (status, now["policy"], now["scorer"]) == (200, "round_robin", None)
        for _ in range(4):
            await client.post(token_body())
        assert {receipt.policy for receipt in receipts(gateway)} == {"round_robin"}
        assert {receipt.route_reason for receipt in receipts(gateway)} == {RouteReason.ROUND_ROBIN}
        assert all(not receipt.remote_bytes_read for receipt in receipts(gateway))
        assert [len(worker.requests) for worker in workers] == [2, 2]


async def test_unknown_policies_are_named_and_change_nothing() -> None:
    async with running() as gateway, client_of(gateway) as client:
        for body in ({"policy": "cache_lod"}, {"policy": "cache_load", "scorer": "x"}, {"polic": "x"}, []):
            status, answer = await client.admin("PUT", "/admin/policy", body)
            assert status == 400 and answer["error"]["message"]
        assert (await client.admin("GET", "/admin/policy"))[1]["policy"] == "cache_load"


async def test_match_answers_what_would_happen_and_dispatches_nothing() -> None:
    workers = [ScriptedWorker(name) for name in "ab"]
    async with running(*workers) as gateway, client_of(gateway) as client:
        _, _, headers = await client.post(token_body(64))
        holder = headers["x-kvrelay-worker"]
        status, answer = await client.admin("POST", "/admin/match", token_body(64))
        assert status == 200 and answer["chosen"] == holder and answer["prompt_tokens"] == 64
        matched = {each["worker"]: each["matched_tokens"] for each in answer["candidates"]}
        assert matched == {"a": 0, "b": 0, holder: 48}
        assert sum(len(worker.requests) for worker in workers) == 1
        assert len(receipts(gateway)) == 1


async def test_workers_come_and_go_while_running() -> None:
    late = ScriptedWorker("late")
    async with running() as gateway, client_of(gateway) as client:
        await late.start()
        status, added = await client.admin("POST", "/admin/workers", {"url": late.url + "/v1/", "name": "late"})
        assert (status, added["url"]) == (201, late.url)
        await until(lambda: any(worker.routable for worker in gateway.status().workers))
        assert (await client.post(token_body()))[0] == 200
        assert (await client.admin("POST", "/admin/workers", {"url": late.url}))[0] == 409
        assert (await client.admin("POST", "/admin/workers", {"url": "ftp://x"}))[0] == 400
        assert (await client.admin("POST", "/admin/workers", {"url": "http://x:1", "api_key_file": "/etc/x"}))[0] == 400
        assert (await client.admin("POST", "/admin/workers/late/drain"))[0] == 200
        assert (await client.post(token_body()))[0] == 503
        assert (await client.admin("GET", "/admin/workers/late"))[1]["draining"] is True
        await client.admin("POST", "/admin/workers/late/resume")
        assert (await client.post(token_body()))[0] == 200
        assert (await client.admin("POST", "/admin/workers/late/resync"))[0] == 200
        await client.admin("POST", "/admin/workers", {"url": "http://127.0.0.1:1", "name": "nobody"})
        status, kept = await client.admin("POST", "/admin/workers/nobody/reset")
        assert status == 502
        assert kept["error"]["message"] == "`nobody` kept its cache: it has not said yet what it is"
        await client.admin("DELETE", "/admin/workers/nobody")
        reset = await client.admin("POST", "/admin/workers/late/reset")
        assert reset == (200, {"worker": "late", "done": "reset"})
        assert (await client.admin("DELETE", "/admin/workers/late"))[0] == 200
        assert (await client.admin("GET", "/admin/workers/late"))[0] == 404
        assert (await client.admin("GET", "/admin/workers"))[1] == {"workers": []}
        await late.stop()


async def test_receipts_are_found_by_id_and_bounded() -> None:
    async with running(ScriptedWorker("a")) as gateway, client_of(gateway) as client:
        for number in range(3):
            await client.post(token_body(), x_request_id=f"r{number}")
        _, listed = await client.admin("GET", "/admin/receipts?limit=2")
        assert [each["request_id"] for each in listed["receipts"]] == ["r2", "r1"]
        assert (await client.admin("GET", "/admin/receipts/r0"))[1]["request_id"] == "r0"
        assert (await client.admin("GET", "/admin/receipts/none"))[0] == 404
        assert (await client.admin("GET", "/admin/receipts?limit=x"))[0] == 400


async def test_status_and_metrics_tell_the_same() -> None:
    async with running(ScriptedWorker("a")) as gateway, client_of(gateway) as client:
        await client.post(token_body())
        _, status = await client.admin("GET", "/admin/status")
        assert status["gateway"]["open_requests"] == 0 and status["workers"][0]["name"] == "a"
        _, metrics = await client.admin("GET", "/metrics")
        assert 'kvrelay_requests_total{policy="cache_load",status="ok",worker="a"} 1.0' in metrics
        assert 'kvrelay_active_requests{worker="a"} 0.0' in metrics


async def test_the_token_is_wanted_when_there_is_one_and_web_pages_are_never_answered(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    async with running(gateway__admin_token_file=token) as gateway, client_of(gateway) as client:
        assert (await client.admin("GET", "/admin/status"))[0] == 401
        assert (await client.admin("GET", "/admin/status", Authorization="Bearer wrong"))[0] == 401
        admitted = {"Authorization": "Bearer secret"}
        assert (await client.admin("GET", "/admin/status", **admitted))[0] == 200
        assert (await client.admin("GET", "/admin/status", Origin="http://evil.example", **admitted))[0] == 403
        assert (await client.admin("GET", "/admin/nothing", **admitted))[0] == 404


async def test_what_is_not_there_is_answered_with_what_is() -> None:
    async with running(ScriptedWorker("a")) as gateway, client_of(gateway) as client:

        async def refused(method: str, path: str) -> tuple[int, str]:
            status, answer = await client.admin(method, path)
            return status, answer["error"]["message"]

        status, message = await refused("GET", "/admin/statsu")
        assert status == 404
        assert message.startswith("no such path: `/admin/statsu`; paths: /metrics, /admin/status, /admin/workers, ")
        assert await refused("POST", "/admin/status") == (
            405,
            "POST is not answered at `/admin/status`; legal: GET, HEAD",
        )
        assert await refused("POST", "/admin/workers/b/drain") == (404, "no worker is called `b`; known: a")
        assert (await refused("GET", "/admin/receipts/x"))[1].startswith("no receipt of `x`")
