"""Claims against what real vLLM workers hit: a lost tail is found by them alone; sound traffic is not suspected."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.edge.fleet.lossy import behind_proxy
from tests.real.client import Sessions
from tests.real.conftest import gateway
from tests.real.engine import VllmWorker
from tests.real.test_events import HIT_TOKENS, Prompts, claimed, complete, next_seq, receipts

pytestmark = [pytest.mark.real, pytest.mark.timeout(1500)]

Pair = tuple[VllmWorker, VllmWorker]
PAUSE_S = 0.5
CAUGHT_WITHIN_REQUESTS = 18  # together with the pauses less than ten seconds of traffic


@pytest.mark.covers("DR-07", "TP-01")
async def test_a_dropped_tail_is_caught_by_hits_that_nobody_claimed(workers: Pair) -> None:
    (prompt,) = Prompts(21).some(1)
    async with behind_proxy(workers[0]) as (watch, proxy):
        seq = await next_seq(watch)
        proxy.do("drop tail")
        await complete(watch.gateway.url, prompt)
        assert await claimed(watch, prompt) == [0], "the engine has it, and nobody heard of it"
        sent = 1
        while watch.target().next_event_seq == seq:
            assert sent < CAUGHT_WITHIN_REQUESTS, watch.target()
            await asyncio.sleep(PAUSE_S)
            await complete(watch.gateway.url, prompt)
            sent += 1
        assert proxy.withheld() == 1 and watch.reports()["tail_drift"] == 1
        assert "event_gap" not in watch.reports(), "no number was missing"
        assert await claimed(watch, prompt) == [HIT_TOKENS]
        await complete(watch.gateway.url, prompt)
        newest = (await receipts(watch, sent + 1))[-1]
        assert newest.matched_tokens_at_route == newest.actual_cached_tokens == HIT_TOKENS


@pytest.mark.covers("RC-12")
def test_sound_traffic_is_not_suspected(workers: Pair, tmp_path: Path) -> None:
    with gateway(workers, tmp_path / "r.jsonl") as client:
        sessions = Sessions(6, seed=2)
        sent = sessions.play(client, turns=4)
        prompt = next(iter(sessions.prompts.values()))
        for _ in range(4):  # all of it is computed for the probabilities of its tokens
            client.complete(prompt, prompt_logprobs=1)
        for _ in range(4):  # one answer counts the hits of three prompts
            client.complete([prompt, prompt, prompt])  # type: ignore[arg-type]
        written = client.receipts(sent + 8)
        drifts = [target["drift"] for worker in client.workers() for target in worker["targets"]]
    assert [receipt.unscored_because for receipt in written[sent : sent + 4]] == ["prompt_logprobs"] * 4
    assert {receipt.actual_cached_tokens for receipt in written[sent : sent + 4]} == {0}
    assert sum(drift["compared"] for drift in drifts) >= sent - 2
    assert [(drift["over_claim"], drift["under_claim"], drift["resyncs"]) for drift in drifts] == [(0, 0, 0)] * 2
