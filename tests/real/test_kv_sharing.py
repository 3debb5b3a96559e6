"""One real vLLM worker computes, another one loads: in time, to the bit, and said in receipts as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.real.conftest import gateway
from tests.real.engine import BLOCK_SIZE, VERSION
from tests.real.kv_pair import KvPair, prompt_of
from tests.real.kv_worker import CHUNK_TOKENS, wait_for

pytestmark = [pytest.mark.real, pytest.mark.timeout(1500)]

PROMPTS = 50
TIERS = ("valkey", "folder", "s3")


@pytest.mark.covers("TR-11", "TR-20", "CN-01", "CN-02", "S34")
@pytest.mark.parametrize("tier", TIERS)
def test_b_loads_what_a_computed_and_is_sooner_with_its_first_token(kv_pair: KvPair, tier: str) -> None:
    cold, loaded = [], []
    for number in range(3):
        prompt = prompt_of(1600, seed=10 * TIERS.index(tier) + number)
        kv_pair.a.forget()
        kv_pair.b.forget()
        kv_pair.shared.empty(*TIERS)
        saved = kv_pair.a.stats().get("saves_stored", 0)
        cold.append(kv_pair.a.first_token_s(prompt))
        kv_pair.a.wait_until_saved(saved + 1600 // CHUNK_TOKENS)
        kv_pair.shared.leave(tier)
        answered = kv_pair.b.complete(prompt, max_tokens=1)
        loaded.append(answered.seconds)
        assert (answered.kv["outcome"], answered.kv.get("local_tokens", 0)) == ("hit", 0)
        assert answered.kv["loaded_tokens"] == answered.kv["planned_tokens"] == answered.cached_tokens == 1568
        scope = "cluster" if tier == "valkey" else "persistent"
        assert answered.kv["tokens_by_scope"] == {"engine": 0, scope: 1568}
    print(f"\n{tier}: cold {_ms(cold)} ms, loaded {_ms(loaded)} ms, last path {answered.kv['ms']}")
    assert tier == "s3" or min(loaded) <= 0.4 * min(cold)


def test_a_remote_hit_of_1755_tokens_beside_a_local_one_and_a_cold_one(kv_pair: KvPair) -> None:
    cold, loaded, local = [], [], []
    for seed in (51, 52, 53):
        prompt = prompt_of(1755, seed=seed)
        saved = kv_pair.a.stats().get("saves_stored", 0)
        cold.append(kv_pair.a.first_token_s(prompt))
        kv_pair.a.wait_until_saved(saved + 1755 // CHUNK_TOKENS)
        answered = kv_pair.b.complete(prompt, max_tokens=1)
        assert (answered.kv["outcome"], answered.kv["loaded_tokens"]) == ("hit", 1755 // CHUNK_TOKENS * CHUNK_TOKENS)
        loaded.append(answered.seconds)
        local.append(kv_pair.b.first_token_s(prompt))
    print(f"\n1755 tokens: cold {_ms(cold)} ms, remote hit {_ms(loaded)} ms, local hit {_ms(local)} ms")
    assert min(local) < min(cold) and min(loaded) < min(cold)


@pytest.mark.covers("S33", "CN-05")
def test_what_was_loaded_gives_the_same_answer_to_the_bit(kv_pair: KvPair) -> None:
    """Against a local hit of the same prompt, and, in float32, against the cold one. Lengths are such that all of them
    reuse the same number of tokens, so that the engine splits its work alike. Where but one token is left to compute,
    its row goes through another kernel than among others, which on some processors (AVX-512) rounds otherwise."""
    prompts = [prompt_of(length, seed=100 + i) for i, length in zip(range(PROMPTS), _lengths(), strict=False)]
    a, b = kv_pair.a, kv_pair.b
    saved = a.stats().get("saves_stored", 0)
    cold = [a.complete(prompt) for prompt in prompts]
    a.wait_until_saved(saved + sum(len(prompt) // CHUNK_TOKENS for prompt in prompts))
    b.forget()
    loaded = [b.complete(prompt) for prompt in prompts]
    warm = [b.complete(prompt) for prompt in prompts]
    for prompt, was_cold, was_loaded, was_warm in zip(prompts, cold, loaded, warm, strict=True):
        reused = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert was_cold.kv["cached_tokens"] == 0
        assert (was_loaded.kv["outcome"], was_loaded.kv["loaded_tokens"]) == ("hit", reused)
        assert was_loaded.kv.get("local_tokens", 0) == 0
        assert (was_warm.kv["outcome"], was_warm.kv["local_tokens"]) == ("none", reused)
        assert was_loaded.exact == was_warm.exact
        assert was_loaded.exact[0] == was_cold.exact[0], "the same tokens"
        if len(prompt) - reused > 1:
            assert was_loaded.exact == was_cold.exact


@pytest.mark.covers("TR-07", "RC-12")
def test_receipts_counters_and_the_connector_tell_one_story(kv_pair: KvPair, tmp_path: Path) -> None:
    """Also after loads that failed; the engine's own figure would be the plan."""
    a, b = kv_pair.a, kv_pair.b
    whole, broken = prompt_of(700, seed=201), prompt_of(700, seed=202)
    kv_pair.compute_on_a(whole)
    files, _ = kv_pair.compute_on_a(broken)
    kv_pair.shared.leave("folder")
    damage(sorted(files)[: len(files) // 2])
    a.forget()
    b.forget()
    before, metrics = b.stats(), b.counters()
    with gateway([b], tmp_path / "r.jsonl", kv_reports={b.url: b.report}) as client:
        for prompt in (whole, broken):
            for stream in (True, False):
                b.forget()
                client.complete(prompt, stream=stream)
        receipts = client.receipts(4)
    for receipt in receipts[:2]:
        assert receipt.remote_outcome == "hit"
        assert receipt.actual_cached_tokens == receipt.remote_loaded_tokens == 640
    assert receipts[2].remote_outcome == "corrupt" and receipts[2].remote_loaded_tokens is not None
    assert receipts[2].actual_cached_tokens == receipts[2].remote_loaded_tokens < 640
    for receipt in receipts:
        parts = {name: ms for name, ms in receipt.remote_path_ms.items() if not name.startswith("predicted")}
        assert sum(parts.values()) - parts["total"] == pytest.approx(parts["total"], abs=0.1)
    for name, member in (("loaded_tokens", "remote_loaded_tokens"), ("read_bytes", "remote_bytes_read")):
        total = sum(getattr(receipt, member) for receipt in receipts)
        assert total > 0
        assert b.stats()[name] - before.get(name, 0) == total
        wait_for(lambda name=name, total=total: b.counters()[name] - metrics.get(name, 0) == total)


def damage(files: list[Path]) -> None:
    """One byte of each, in the middle of its payload."""
    for file in files:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.unlink()
        file.write_bytes(content)


def _lengths() -> Any:
    """Of prompts of which a whole number of chunks is reused, and no block beyond."""
    while True:
        yield from range(CHUNK_TOKENS + 1, CHUNK_TOKENS + BLOCK_SIZE + 1, 5)
        yield from range(2 * CHUNK_TOKENS + 1, 2 * CHUNK_TOKENS + BLOCK_SIZE + 1, 5)


def _ms(seconds: list[float]) -> str:
    return json.dumps([round(value * 1000) for value in seconds])


@pytest.mark.covers("CN-08", "CC-18")
def test_a_worker_says_what_it_does_with_failed_loads_and_what_it_is_made_of(kv_pair: KvPair) -> None:
    """What `kvrelay doctor` asks for; the engine's own default would be `fail`."""
    told = kv_pair.b.settings()
    assert told["load_failure_policy"] == "recompute"
    assert told["versions"]["vllm"].startswith(VERSION)
