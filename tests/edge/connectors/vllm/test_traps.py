"""Ten things that a real vLLM 0.32 was seen to do and that a router falls for, each with what we do about it.

Events go the whole way: as the engine encodes them, through the decoder, into the router's index.
"""

from __future__ import annotations

import aiohttp
import msgspec
import numpy as np
import pytest

from kvrelay.core.contract.fields import Contract, ContractError
from kvrelay.core.model.events import ResidencyReset, WorkerJoined
from kvrelay.core.model.units import Fault, IndexState, Status
from kvrelay.edge.connectors.vllm.events import decode_batch
from kvrelay.edge.http.server import Exchange
from kvrelay.edge.system.config import WorkerConfig
from tests.core.routing.rig import SIZE, Rig, text
from tests.edge.fleet import scripted as fleet_scripted
from tests.edge.fleet.test_static import running as running_fleet
from tests.edge.gateway.scripted import (
    ANSWER,
    JSON,
    ScriptedWorker,
    client_of,
    hang,
    receipts,
    running,
    token_body,
    until,
)


def stored(rig: Rig, tokens: np.ndarray) -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": list(rig.hashes(tokens)),
        "parent_block_hash": None,
        "token_ids": tokens.tolist(),
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * (len(tokens) // SIZE),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def removed(rig: Rig, tokens: np.ndarray) -> list[dict[str, object]]:
    """One event per block, the last one first."""
    hashes = reversed(rig.hashes(tokens))
    return [{"type": "BlockRemoved", "block_hashes": [one], "medium": "GPU", "group_idx": 0} for one in hashes]


CLEARED: dict[str, object] = {"type": "AllBlocksCleared"}


def publish(rig: Rig, *events: dict[str, object]) -> None:
    rig.publish("a", *decode_batch(msgspec.msgpack.encode([1.5, list(events), 0])).events)


def claimed(rig: Rig, tokens: np.ndarray) -> int | None:
    return rig.serve(tokens).matched_blocks_at_route


@pytest.fixture
def rig() -> Rig:
    rig = Rig()
    rig.join("a")
    return rig


@pytest.mark.covers("S09")
def test_trap_1_a_clear_comes_with_the_next_step_and_before_what_that_step_stored(rig: Rig) -> None:
    publish(rig, stored(rig, text(1, blocks=4)))
    rig.step(ResidencyReset("a"))  # whoever resets clears what is known, at the same moment
    assert claimed(rig, text(1, blocks=4)) == 0
    publish(rig, CLEARED, stored(rig, text(2, blocks=3)))
    assert (claimed(rig, text(1, blocks=4)), claimed(rig, text(2, blocks=3))) == (0, 3)


@pytest.mark.covers("S10")
def test_trap_2_a_block_is_held_until_its_last_copy_is_gone(rig: Rig) -> None:
    tokens = text(1, blocks=2)
    publish(rig, stored(rig, tokens), stored(rig, tokens))
    publish(rig, *removed(rig, tokens))
    assert claimed(rig, tokens) == 2
    publish(rig, *removed(rig, tokens))
    assert claimed(rig, tokens) == 0


def test_trap_2_two_copies_removed_in_one_batch_are_two(rig: Rig) -> None:
    tokens = text(1)
    publish(rig, stored(rig, tokens), stored(rig, tokens))
    publish(rig, *removed(rig, tokens), *removed(rig, tokens))
    assert claimed(rig, tokens) == 0


@pytest.mark.covers("RT-22", "S03")
@pytest.mark.parametrize("first", ["event", "metrics"])
async def test_trap_3_a_restart_that_the_wire_does_not_name_is_a_new_incarnation(first: str) -> None:
    interval_s = 60 if first == "event" else 0.05
    async with (
        fleet_scripted.ScriptedWorker() as worker,
        running_fleet(WorkerConfig(url=worker.url, name="a"), interval_s=interval_s) as run,
    ):
        await run.until(lambda: run.of(WorkerJoined))
        await run.subscribed(worker)
        worker.become_new_process()
        if first == "event":
            await worker.publish(0, fleet_scripted.payload(fleet_scripted.stored([1], [1, 2, 3, 4])))
        await run.until(lambda: len(run.of(WorkerJoined)) == 2)
        assert run.of(WorkerJoined)[1].worker.incarnation == f"{worker.start_s:.2f}"


def test_trap_4_cached_tokens_of_a_failed_load_are_no_evidence_of_residency(rig: Rig) -> None:
    """The engine reports what it planned to load. What it has is what its events say: stored, and taken back."""
    tokens = text(1, blocks=15)
    rig.arrive(tokens)
    rig.accept()
    publish(rig, stored(rig, tokens), *removed(rig, tokens))  # one batch, as with kv_load_failure_policy=fail
    receipt = rig.finish(cached=15 * SIZE)
    assert receipt.actual_cached_tokens == 15 * SIZE  # its own word, kept as such
    assert claimed(rig, tokens) == 0
    assert rig.serve(tokens).index_state is IndexState.LIVE


async def test_trap_5_a_request_that_is_loaded_again_and_again_ends_at_its_first_byte_deadline() -> None:
    """The engine goes on until the client leaves: so we leave, and its worker sees it."""
    looping, other = ScriptedWorker("a", hang), ScriptedWorker("b")
    flags = {"gateway__timeouts__first_byte_s": 0.2, "gateway__policy": "round_robin"}
    async with running(looping, other, **flags) as gateway, client_of(gateway) as client:
        answers = [await client.post(token_body()) for _ in range(2)]
        assert all(status in (200, 504) for status, _, _ in answers)
        await until(lambda: len(looping.left) == len(looping.requests) >= 1)
        faults = {attempt.fault for receipt in receipts(gateway) for attempt in receipt.attempts}
        assert Fault.FIRST_BYTE_TIMEOUT in faults


async def test_trap_6_a_worker_whose_engine_died_is_out_within_a_probe_and_its_requests_are_done_elsewhere() -> None:
    def dead(exchange: Exchange) -> None:
        exchange.respond(500, (JSON,), b'{"error":{"message":"EngineCore encountered an issue.","code":500}}')

    a, b = ScriptedWorker("a", dead), ScriptedWorker("b")
    async with running(a, b, gateway__policy="round_robin") as gateway, client_of(gateway) as client:
        for _ in range(2):
            assert (await client.post(token_body()))[:2] == (200, ANSWER)
        a.healthy = False  # 503 from /health until the server exits
        await until(lambda: [worker.up for worker in gateway.status().workers] == [False, True])
        await a.stop()
        assert (await client.post(token_body()))[0] == 200
        assert {receipt.status for receipt in receipts(gateway)} == {Status.OK}


async def test_trap_7_a_stalled_engine_is_suspended_though_its_health_says_200() -> None:
    stalled, other = ScriptedWorker("a", hang), ScriptedWorker("b")
    flags = {"gateway__timeouts__first_byte_s": 0.2, "gateway__policy": "round_robin"}
    async with running(stalled, other, **flags) as gateway, client_of(gateway) as client:
        for _ in range(6):
            await client.post(token_body())
        status = next(worker for worker in gateway.status().workers if worker.name == "a")
        assert status.up and not status.routable
        assert len(stalled.requests) < 6


async def test_trap_8_a_stream_that_hangs_in_a_shutdown_ends_by_its_idle_time() -> None:
    def begins_and_hangs(exchange: Exchange) -> None:
        exchange.start(200, ((b"content-type", b"text/event-stream"),))
        exchange.write(b'data: {"choices":[{"index":0,"text":"one"}]}\n\n')

    worker = ScriptedWorker("a", begins_and_hangs)
    async with running(worker, gateway__timeouts__idle_s=0.2) as gateway, client_of(gateway) as client:
        with pytest.raises(aiohttp.ClientPayloadError):
            await client.post(token_body(stream=True))
        (receipt,) = receipts(gateway)
        assert (receipt.status, receipt.attempts[0].fault) == (Status.TIMEOUT, Fault.IDLE_TIMEOUT)


async def test_trap_9_an_abort_without_a_token_is_done_elsewhere_though_health_and_status_say_200() -> None:
    def draining(exchange: Exchange) -> None:
        choice = b'{"index":0,"text":"","finish_reason":"abort"}'
        exchange.respond(200, (JSON,), b'{"choices":[%b],"usage":{"completion_tokens":0}}' % choice)

    a, b = ScriptedWorker("a", draining), ScriptedWorker("b")
    async with running(a, b, gateway__policy="round_robin") as gateway, client_of(gateway) as client:
        answers = [await client.post(token_body()) for _ in range(3)]
        assert [(status, body) for status, body, _ in answers] == [(200, ANSWER)] * 3
        assert a.requests and {headers["x-kvrelay-worker"] for _, _, headers in answers} == {"b"}


def test_trap_10_kv_of_another_dtype_is_foreign_and_an_unknown_dtype_an_error() -> None:
    """The engine takes such bytes silently and answers garbage with 200, so they must never share a name."""
    known: dict[str, object] = dict.fromkeys(Contract.__struct_fields__, "x") | {"block_size": 32}
    bf16 = Contract.from_mapping({**known, "kv_dtype": "bfloat16"}, source="a")
    fp32 = Contract.from_mapping({**known, "kv_dtype": "float32"}, source="b")
    assert bf16.digest() != fp32.digest()
    assert bf16.differing_fields(fp32) == ("kv_dtype",)
    del known["kv_dtype"]
    with pytest.raises(ContractError, match="missing: `kv_dtype`"):
        Contract.from_mapping(known, source="a")
