"""llama.cpp's real server behind the gateway: recognised, scored by its own tokens, guessed and corrected."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvrelay.core.receipts.receipt import Receipt
from kvrelay.edge.connectors.base import WorkerAnswerUnusable
from kvrelay.edge.connectors.openai import GUESSED_BLOCK_TOKENS
from kvrelay.edge.connectors.registry import detect
from kvrelay.edge.system.ports import spare_port
from tests.real.client import Client, Sessions
from tests.real.conftest import gateway
from tests.real.engine import EngineUnavailable
from tests.real.llamacpp import LlamaCppWorker, installed

pytestmark = [pytest.mark.real, pytest.mark.timeout(600), pytest.mark.covers("TP-16")]

Pair = tuple[LlamaCppWorker, LlamaCppWorker]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    workers: tuple[LlamaCppWorker, ...] = ()
    try:
        engine = installed()
        workers = tuple(LlamaCppWorker(engine, port=spare_port(), folder=tmp_path) for _ in range(2))
        for worker in workers:
            worker.start()
        yield workers[0], workers[1]
    except EngineUnavailable as reason:
        pytest.fail(f"the real llama.cpp cannot run here: {reason}", pytrace=False)
    finally:
        for worker in workers:
            worker.kill()


def tokens(count: int, *, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(3, 259) for _ in range(count)]


def asked_directly(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    return json.loads(Client(url, "", Path()).post(path, body or {}))


def test_it_is_recognised_and_its_residency_marked_approximate(pair: Pair, tmp_path: Path) -> None:
    with gateway(pair, tmp_path / "r.jsonl", index_state="approximate") as client:
        workers = client.workers()
    assert [worker["engine"] for worker in workers] == ["llamacpp", "llamacpp"]
    assert len({worker["incarnation"] for worker in workers}) == 2
    assert not any(worker["incarnation"].startswith("life-") for worker in workers)  # it says itself which life it is


def test_growing_sessions_hit_what_was_claimed(pair: Pair, tmp_path: Path) -> None:
    """A claim of whole guessed blocks is at most the hit; prompts that nothing forks are kept whole."""
    with gateway(pair, tmp_path / "r.jsonl", index_state="approximate") as client:
        sent = Sessions(4, seed=3).play(client, turns=4, at_once=1)
        receipts = client.receipts(sent)
    assert [receipt.status for receipt in receipts] == ["ok"] * sent
    for receipt in receipts[4:]:  # every later turn of a session
        actual, claimed = known(receipt.actual_cached_tokens), known(receipt.matched_tokens_at_route)
        assert 0 < claimed <= actual, receipt
    hit = sum(known(receipt.actual_cached_tokens) for receipt in receipts)
    assert hit > 0.5 * sum(known(receipt.prompt_tokens) for receipt in receipts)


def test_texts_and_chats_are_scored_with_the_tokens_it_sees(pair: Pair, tmp_path: Path) -> None:
    text = "Which of you has seen this long question before, <s> with a marker in it? " * 4
    chat = {"messages": [{"role": "system", "content": text}, {"role": "user", "content": "äöü and you?"}]}
    more = {"model": "tiny", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    with gateway(pair, tmp_path / "r.jsonl", index_state="approximate") as client:
        for path, body in (("/v1/completions", {"prompt": text}), ("/v1/chat/completions", chat)):
            for stream in (False, True, True):
                client.post(path, {**more, **body, "stream": stream}, {"x-session-id": path})
        receipts = client.receipts(6)
    for first, *later in (receipts[:3], receipts[3:]):
        assert first.eligible_prefix_tokens == known(first.prompt_tokens) // GUESSED_BLOCK_TOKENS * GUESSED_BLOCK_TOKENS
        for receipt in later:
            assert receipt.prompt_tokens == first.prompt_tokens
            assert receipt.actual_cached_tokens == known(first.prompt_tokens) - 1  # in both response modes
            assert 0 < known(receipt.matched_tokens_at_route) <= known(receipt.actual_cached_tokens)


def test_what_a_fork_overwrote_is_not_claimed(pair: Pair, tmp_path: Path) -> None:
    prompt = tokens(640, seed=1)
    fork = prompt[:480] + tokens(160, seed=2)
    with gateway(pair[:1], tmp_path / "r.jsonl", index_state="approximate") as client:
        for sent in (prompt, fork, prompt, prompt):
            client.complete(sent)
        _, forked, back, again = client.receipts(4)
    assert forked.actual_cached_tokens == 480
    assert back.actual_cached_tokens == 480
    assert known(back.matched_tokens_at_route) == 480  # by blocks alone it would be all of the prompt
    assert again.actual_cached_tokens == 639 and known(again.matched_tokens_at_route) <= 639


def test_a_restarted_server_is_a_new_life_without_claims(pair: Pair, tmp_path: Path) -> None:
    prompt = tokens(320, seed=4)
    with gateway(pair[:1], tmp_path / "r.jsonl", index_state="approximate") as client:
        client.complete(prompt)
        client.complete(prompt)
        before = client.incarnation(pair[0].url)
        pair[0].kill()
        pair[0].start()
        deadline = time.monotonic() + 60
        while client.incarnation(pair[0].url) == before or not client.workers()[0]["routable"]:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        client.complete(prompt)
        receipts = client.receipts(3)
    warm, cold = receipts[1], receipts[2]
    assert warm.actual_cached_tokens == 319 and known(warm.matched_tokens_at_route) > 0
    assert (cold.actual_cached_tokens, known(cold.matched_tokens_at_route)) == (0, 0)
    assert cold.incarnation != warm.incarnation


async def test_its_page_in_canonical_words_is_what_the_answers_added_up_to(pair: Pair) -> None:
    worker = pair[0]
    async with aiohttp.ClientSession() as session:
        connector = await detect(session, worker.url, {})
        before = await connector.scrape(session, worker.url, {})
        body = {"model": "tiny", "prompt": tokens(200, seed=5), "max_tokens": 2, "temperature": 0}
        for _ in range(3):
            asked_directly(worker.url, "/v1/completions", body)
        after = await connector.scrape(session, worker.url, {})
        assert before is not None and after is not None
        assert (before.prefix_queries_tokens, before.prefix_hits_tokens) == (0, 0)
        assert (after.prefix_queries_tokens, after.prefix_hits_tokens) == (600, 398)
        assert after.ranks[0].running_requests == 0 and after.ranks[0].kv_usage_ratio is None
        with pytest.raises(WorkerAnswerUnusable, match="no way to drop"):
            await connector.reset(session, worker.url, {})


def known(count: int | None) -> int:
    assert count is not None
    return count


def test_requests_may_switch_its_cache_off_or_name_a_slot(pair: Pair, tmp_path: Path) -> None:
    prompt = tokens(200, seed=6)
    with gateway(pair[:1], tmp_path / "r.jsonl", index_state="approximate") as client:
        for more in ({}, {}, {"cache_prompt": False}, {"id_slot": 2}, {"id_slot": 2}):
            client.complete(prompt, **more)
        receipts: list[Receipt] = client.receipts(5)
    assert [receipt.actual_cached_tokens for receipt in receipts] == [0, 199, 0, 0, 199]
