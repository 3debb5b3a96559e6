"""Agents on two workers under virtual time: conversations are placed so that reuse and balance hold for any order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from itertools import chain

import pytest
from bench.agents import traffic

from kvrelay.core.engine.cost import StepCost
from kvrelay.core.engine.engine import EngineSettings
from kvrelay.core.model.effects import Effect, WriteReceipt
from kvrelay.core.model.events import Event
from kvrelay.core.receipts.receipt import Receipt
from kvrelay.core.routing.settings import RouterSettings
from kvrelay.core.stats.balance import max_over_mean
from kvrelay.core.stats.distribution import distribution
from kvrelay.core.traces.plan import Plan, PlannedSession
from kvrelay.lab.sim.world import SimRequest, WorkerSetup, World

PACE = 1.5
START_S = 0.5  # the first probes are over


def play(plan: Plan, policy: str, seed: int) -> list[Receipt]:
    """Every turn follows the answer to the one before it; the two workers are not quite equally fast."""
    chance = random.Random(f"{seed}/speeds")
    setups = [WorkerSetup(name=name, engine=_engine(1_500 * chance.uniform(0.85, 1.15))) for name in "ab"]
    waiting: dict[str, tuple[PlannedSession, int]] = {}

    def submit(session: PlannedSession, number: int, after_s: float) -> None:
        turn = session.turns[number]
        request = SimRequest(
            request_id=f"{session.session_id}:{number}", token_ids=turn.token_ids, max_tokens=turn.max_tokens
        )
        if number + 1 < len(session.turns):
            waiting[request.request_id] = (session, number + 1)
        world.submit(max(START_S + turn.due_ms / 1000, after_s) + chance.uniform(0.0, 0.02), request)

    def go_on(now_s: float, event: Event, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            if isinstance(effect, WriteReceipt) and effect.receipt.request_id in waiting:
                session, number = waiting.pop(effect.receipt.request_id)
                submit(session, number, now_s + session.turns[number].think_ms / 1000)

    world = World(setups, settings=RouterSettings(policy=policy), seed=seed, observer=go_on)
    for session in plan.sessions:
        submit(session, 0, 0.0)
    world.run()
    world.check()
    assert len(world.receipts) == plan.requests
    return world.receipts


def _engine(prefill_tokens_per_s: float) -> EngineSettings:
    cost = StepCost(prefill_tokens_per_s=prefill_tokens_per_s, decode_ms=12.0)
    return EngineSettings(block_size_tokens=32, blocks=640, max_model_len=4_096, cost=cost)


def _promises_kept(receipts: list[Receipt]) -> bool:
    prefilled, requests, hits = Counter[str](), Counter[str](), 0
    for receipt in receipts:
        assert receipt.chosen_worker and receipt.actual_cached_tokens is not None and receipt.prompt_tokens
        requests[receipt.chosen_worker] += 1
        prefilled[receipt.chosen_worker] += receipt.prompt_tokens - receipt.actual_cached_tokens
        hits += receipt.actual_cached_tokens
    reused = hits / (hits + prefilled.total())
    balance = max_over_mean({name: float(prefilled[name]) for name in "ab"})
    return reused >= 0.70 and balance is not None and balance <= 1.10 and max(requests.values()) <= 0.55 * len(receipts)


def _p95_ms(receipts: Iterable[Receipt]) -> float:
    p95 = distribution([receipt.ttft_ms for receipt in receipts if receipt.ttft_ms is not None]).p95
    assert p95 is not None
    return p95


def test_reuse_and_balance_hold_for_nearly_every_order_of_arrival():
    """All three promises in 19 of 20 orders (12 before moves were weighed); first tokens come sooner."""
    plans = [traffic.sessions(seed, PACE) for seed in range(40)]
    ours = [play(plan, "cache_load", seed) for seed, plan in enumerate(plans)]
    assert sum(map(_promises_kept, ours)) >= 38
    control = [play(plan, "round_robin", seed) for seed, plan in enumerate(plans)]
    assert _p95_ms(chain.from_iterable(control)) >= 1.8 * _p95_ms(chain.from_iterable(ours))


@pytest.mark.parametrize("seed", range(5))
def test_a_hot_prefix_and_a_burst_are_computed_at_most_twice(seed):
    hot = play(traffic.hot_prefix(seed, PACE), "cache_load", seed)
    assert _computed([receipt for receipt in hot if receipt.request_id.startswith("hot")]) <= 2
    assert max(Counter(receipt.chosen_worker for receipt in hot).values()) <= 0.65 * len(hot)
    assert _computed(play(traffic.burst(seed, PACE), "cache_load", seed)) <= 2


def _computed(receipts: list[Receipt]) -> int:
    return sum((receipt.actual_cached_tokens or 0) < 0.5 * (receipt.prompt_tokens or 0) for receipt in receipts)
