"""Mock workers that share KV through a store: one computes, another one loads, and only under the same contract."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from typer.testing import CliRunner

from kvrelay.cli.store import app as store_app
from kvrelay.core.contract.fields import Contract
from kvrelay.edge.worker.kv_store import own_contract
from kvrelay.edge.worker.launch import MockFleet
from kvrelay.edge.worker.spec import MockSpec
from tests.conformance.stores.places import Peer
from tests.edge.worker.conftest import Client

PROMPT = "a shared prefix that many requests begin with, " * 24  # 1,128 tokens: four chunks of 256 and a tail
FAST = {"prefill_tokens_per_s": 20_000.0, "decode_ms": 0.5, "events": "none", "replay": "none"}


@contextmanager
def fleet(*specs: dict[str, Any]) -> Iterator[list[Client]]:
    workers = MockFleet([MockSpec(name=f"w{i}", **{**FAST, **spec}) for i, spec in enumerate(specs)])
    workers.start()
    try:
        yield [Client(worker.ready.url) for worker in workers.workers]
    finally:
        workers.stop()


def tiers(folder: Path) -> dict[str, Any]:
    return {"tiers": [{"url": f"file://{folder}"}], "deadline_ms": 5000.0}


def ask(worker: Client, prompt: str = PROMPT) -> dict[str, Any]:
    answer = worker.post("/v1/completions", {"model": "mock-model", "prompt": prompt, "max_tokens": 8})
    assert answer.status == 200, answer.body
    return dict(answer.json())


def state(worker: Client) -> dict[str, Any]:
    return dict(worker.get("/mock/state").json()["store"])


def wait_for_chunks(worker: Client, chunks: int) -> None:
    until_s = time.monotonic() + 10
    while state(worker)["stored_chunks"] < chunks:
        assert time.monotonic() < until_s, state(worker)
        time.sleep(0.02)


@pytest.mark.covers("TR-06", "TR-11", "TR-12", "CC-19")
def test_one_computes_and_another_one_loads_the_same(tmp_path: Path) -> None:
    with fleet({"store": tiers(tmp_path)}, {"store": tiers(tmp_path)}) as (a, b):
        computed = ask(a)
        wait_for_chunks(a, 4)
        loaded = ask(b)
        assert computed["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert loaded["usage"]["prompt_tokens_details"]["cached_tokens"] == 1024, "whole chunks only"
        assert loaded["choices"][0]["text"] == computed["choices"][0]["text"]
        assert b.get("/mock/state").json()["wrong_reuse_blocks"] == 0
        page = b.get("/metrics").body.decode()
        assert 'kvrelay_store_ops_total{tier="file",op="fetch",outcome="hit"} 4' in page
        assert f'kvrelay_store_bytes_total{{tier="file",direction="read"}} {4 * (512 + 256)}' in page
        assert 'kvrelay_store_seconds_count{tier="file",op="fetch"}' in page
        assert state(b)["loaded_tokens"] == 1024 and state(b)["loaded_bytes"] == 4 * (512 + 256)


@pytest.mark.covers("SG-16")
def test_a_poisoned_chunk_is_computed_again(tmp_path: Path) -> None:
    with fleet({"store": tiers(tmp_path)}, {"store": tiers(tmp_path)}) as (a, b):
        computed = ask(a)
        wait_for_chunks(a, 4)
        for path in (tmp_path / "objects").rglob("*"):
            if path.is_file() and path.name[:16] != b"contract".hex():
                content = bytearray(path.read_bytes())
                content[600] ^= 1
                path.write_bytes(content)
        loaded = ask(b)
        assert loaded["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert loaded["choices"][0]["text"] == computed["choices"][0]["text"]
        outcomes = {entry["outcome"] for entry in state(b)["ops"] if entry["op"] == "fetch"}
        assert "corrupt" in outcomes and "hit" not in outcomes


@pytest.mark.covers("CN-09")
def test_with_the_policy_fail_an_outage_is_an_error_and_nothing_is_computed_instead() -> None:
    peer = Peer()
    store = {"tiers": [{"url": peer.url}], "deadline_ms": 300.0, "probe_interval_s": 0.1, "failure_policy": "fail"}
    try:
        with fleet({"store": store}) as (worker,):
            ask(worker)
            wait_for_chunks(worker, 4)
            before = worker.get("/mock/state").json()["counters"]
            peer.kill()
            for number in range(20):
                answer = worker.post("/v1/completions", {"model": "mock-model", "prompt": f"{number} {PROMPT}"})
                assert answer.status == 500
                assert answer.json()["error"]["message"].startswith("KV load failed: no answer from peer")
            after = worker.get("/mock/state").json()["counters"]
            assert after == before, "no step was made, no prompt token computed"
            peer.restart()
            wait_until_served(worker)
    finally:
        peer.kill()


def wait_until_served(worker: Client) -> None:
    until_s = time.monotonic() + 20
    while worker.post("/v1/completions", {"model": "mock-model", "prompt": PROMPT}).status != 200:
        assert time.monotonic() < until_s, "the store is back and requests still fail"
        time.sleep(0.05)


def changed(name: str, value: object) -> object:
    return 8 if name == "block_size" else f"another than {value!r}"


@pytest.mark.covers(
    "CC-01", "CC-02", "CC-03", "CC-04", "CC-05", "CC-06", "CC-07", "CC-08", "CC-09", "CC-10", "CC-11", "CC-13", "CC-20",
    "SG-21",
)  # fmt: skip
def test_each_member_of_the_contract_alone_keeps_workers_apart(tmp_path: Path) -> None:
    """One worker stores; for every member there is one that differs in nothing else: no hit, and its answers (from
    which receipts are made) and `kvrelay store verify` name that member and no other."""
    store = tiers(tmp_path / "kv")
    own = structs.asdict(own_contract(MockSpec(store=store)))
    names = list(Contract.__struct_fields__)
    changes = [{name: changed(name, own[name])} for name in names]
    with fleet({"store": store}) as (writer,):
        ask(writer)
        wait_for_chunks(writer, 4)
        with fleet(*({"store": store, "contract": change} for change in ({}, *changes))) as (same, *others):
            assert told(ask(same))["loaded_tokens"] == 1024, "the same contract hits"
            for name, other in zip(names, others, strict=True):
                report = told(ask(other))
                assert (report["outcome"], report["reason"], report["loaded_tokens"]) == ("none", "absent", 0)
                assert state(other)["loaded_tokens"] == 0, f"a hit although `{name}` differs"
                assert report["contract_differs"] == [name]
                verified = verify(tmp_path, {**own, name: changed(name, own[name])})
                theirs = [entry for entry in verified["other_contracts"] if list(entry["differs"]) == [name]]
                assert [entry["objects"] for entry in theirs] == [4], "its four chunks"


def told(answer: dict[str, Any]) -> dict[str, Any]:
    return dict(answer["kv_transfer_params"]["kvrelay"])


def verify(folder: Path, contract: dict[str, Any]) -> dict[str, Any]:
    (folder / "mine.json").write_text(json.dumps(contract))
    ran = CliRunner().invoke(
        store_app, ["verify", f"file://{folder}/kv", "--contract", f"{folder}/mine.json", "--json"]
    )
    assert ran.exit_code == 0, ran.output
    return dict(json.loads(ran.output))
