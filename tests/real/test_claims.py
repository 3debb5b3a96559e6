"""What the router believes, held against two real vLLM workers on CPU."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from kvrelay.core.receipts.reconcile import reconcile
from tests.real.client import Sessions
from tests.real.conftest import gateway
from tests.real.engine import BLOCK_SIZE, VllmWorker

pytestmark = [pytest.mark.real, pytest.mark.timeout(1500)]

Pair = tuple[VllmWorker, VllmWorker]


@pytest.mark.covers("TP-01", "RC-12", "RT-01")
def test_claimed_equals_actual_on_mixed_multi_turn_requests(workers: Pair, tmp_path: Path) -> None:
    with gateway(workers, tmp_path / "r.jsonl") as client:
        sent = Sessions(8, seed=1).play(client, turns=5)
        result = reconcile(client.receipts(sent))
        receipts = client.receipts(sent)
    assert result.compared == sent == 40
    assert result.within_one_block >= 0.95 * sent, Counter(result.stale_index_tokens)
    assert result.actual_tokens > 0.5 * result.eligible_tokens
    for receipt in receipts:
        assert receipt.block_size == BLOCK_SIZE and receipt.engine == "vllm"
        assert receipt.gate_loss_tokens is not None and receipt.eligible_prefix_tokens is not None
        assert receipt.gate_loss_tokens.total + (receipt.actual_cached_tokens or 0) == receipt.eligible_prefix_tokens


@pytest.mark.covers("S17", "DR-05")
def test_a_restarted_router_knows_old_prefixes_from_the_replay(workers: Pair, tmp_path: Path) -> None:
    sessions = Sessions(4, seed=2)
    with gateway(workers, tmp_path / "before.jsonl") as client:
        sent = sessions.play(client, turns=1)
        homes = {r.session_id: r.chosen_worker for r in client.receipts(sent)}
    with gateway(workers, tmp_path / "after.jsonl") as client:
        sessions.play(client, turns=1)
        receipts = client.receipts(sent)
    for receipt in receipts:
        assert receipt.matched_tokens_at_route is not None and receipt.matched_tokens_at_route >= 480
        assert receipt.matched_tokens_at_route == receipt.actual_cached_tokens
    assert sum(homes[r.session_id] == r.chosen_worker for r in receipts) >= 3


@pytest.mark.covers("S18", "SG-02")
def test_a_salt_separates_and_the_claim_knows_it(workers: Pair, tmp_path: Path) -> None:
    prompt = Sessions(1, seed=3).tokens(500)
    with gateway(workers, tmp_path / "r.jsonl") as client:
        for salt in ("x", "x", "y", None):
            client.complete(prompt, **({} if salt is None else {"cache_salt": salt}))
        receipts = client.receipts(4)
    assert [r.actual_cached_tokens for r in receipts] == [0, 480, 0, 0]
    assert [r.matched_tokens_at_route for r in receipts] == [0, 480, 0, 0]


@pytest.mark.covers("S19")
def test_a_chat_is_scored_with_the_engines_own_tokens(workers: Pair, tmp_path: Path) -> None:
    text = "what is a prefix cache? " * 20
    bodies = [text, text, [{"type": "text", "text": text}]]
    with gateway(workers, tmp_path / "r.jsonl") as client:
        for content in bodies:
            chat = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 4}
            answer = json.loads(client.post("/v1/chat/completions", chat))
        receipts = client.receipts(3)
    assert answer["usage"]["prompt_tokens"] == receipts[-1].prompt_tokens
    assert receipts[0].matched_tokens_at_route == 0
    for receipt in receipts[1:]:
        assert receipt.matched_tokens_at_route == receipt.actual_cached_tokens != 0


@pytest.mark.covers("S19", "S20")
def test_messages_are_scored_with_the_engines_own_tokens(workers: Pair, tmp_path: Path) -> None:
    use = {"type": "tool_use", "id": "t1", "name": "look", "input": {"where": "here"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny, and warm"}]}
    turns: list[dict[str, object]] = [{"role": "user", "content": "what will the weather be like? " * 12}]
    more: list[list[dict[str, object]]] = [
        [{"role": "assistant", "content": [{"type": "text", "text": "i look"}, use]}],
        [{"role": "user", "content": [result, {"type": "text", "text": "and"}, {"type": "text", "text": "now?"}]}],
        [],
    ]
    with gateway(workers, tmp_path / "r.jsonl") as client:
        for added in more:
            body = {
                "model": "tiny",
                "max_tokens": 4,
                "system": [{"type": "text", "text": "be kind"}],
                "messages": turns,
            }
            usage = json.loads(client.post("/v1/messages", body))["usage"]
            turns = turns + added
        receipts = client.receipts(3)
    counted = sum(
        usage.get(name, 0) for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    )
    assert counted == receipts[-1].prompt_tokens
    for receipt in receipts:
        assert receipt.unscored_because is None
        assert receipt.matched_tokens_at_route == receipt.actual_cached_tokens, receipts
    assert receipts[-1].actual_cached_tokens


@pytest.mark.covers("RT-22", "DR-03", "RT-21")
def test_a_worker_killed_and_started_again_is_a_new_life_without_stale_claims(workers: Pair, tmp_path: Path) -> None:
    victim, _ = workers
    sessions = Sessions(4, seed=4)
    with gateway(workers, tmp_path / "r.jsonl") as client:
        sent = sessions.play(client, turns=2)
        old = client.incarnation(victim.url)
        victim.kill()
        sent += sessions.play(client, turns=1)  # served by the other one
        victim.start()
        victim.wait_until_up()
        client.wait_for_live(2)
        assert client.incarnation(victim.url) != old
        sent += sessions.play(client, turns=2)
        receipts = client.receipts(sent)
    assert [r.status for r in receipts] == ["ok"] * sent
    for receipt in receipts[-8:]:
        assert (receipt.chosen_worker, receipt.incarnation) != (victim.url.removeprefix("http://"), old)
        assert (receipt.matched_tokens_at_route or 0) <= (receipt.actual_cached_tokens or 0) + BLOCK_SIZE
