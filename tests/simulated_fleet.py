"""Mock engines in virtual time, for tests of statistics: a whole arm in milliseconds, with the noise that arms have.

Three kinds of noise, all from one seeded generator: every engine step takes a little longer or shorter, the machine is
a little faster or slower for a whole arm, and sessions start a little early or late.
"""

from __future__ import annotations

import heapq
import itertools

import numpy as np
from msgspec import Struct

from kvrelay.core.engine.cost import StepCost
from kvrelay.core.engine.engine import Engine, EngineSettings, Finished, StepEnded, StepStarted, Submitted, TokenMade
from kvrelay.core.engine.sequence import EngineRequest
from kvrelay.core.stats.paired import Pair

STEP_NOISE, ARM_NOISE, START_NOISE_MS = 0.10, 0.01, 2.0
WORKERS, OUTPUT_TOKENS, THINK_MS, START_GAP_MS = 2, 2, 40.0, 180.0
LONGEST_TOKENS = 600


class SimulatedPlan(Struct, frozen=True, eq=False):
    """Sessions whose turns each repeat all before them."""

    starts_ms: tuple[float, ...]
    turns: tuple[tuple[np.ndarray, ...], ...]

    @classmethod
    def of(cls, rng: np.random.Generator, *, sessions: int = 20, turns: int = 3) -> SimulatedPlan:
        drawn = []
        for _ in range(sessions):
            whole = rng.integers(300, 30_000, size=LONGEST_TOKENS, dtype=np.uint32)
            lengths = np.sort(rng.integers(100, LONGEST_TOKENS, size=turns))
            drawn.append(tuple(whole[:length] for length in lengths))
        return cls(tuple(float(number * START_GAP_MS) for number in range(sessions)), tuple(drawn))


def run_arm(plan: SimulatedPlan, rng: np.random.Generator, *, slower: float = 1.0) -> dict[tuple[int, int], float]:
    """TTFT in ms by (session, turn), counted from when the turn was due. `slower`: every step takes so much longer."""
    mood = slower * float(np.exp(rng.normal(0.0, ARM_NOISE)))
    settings = EngineSettings(blocks=1200, max_model_len=4096, cost=StepCost(prefill_tokens_per_s=10_000, decode_ms=4))
    engines = [Engine(settings) for _ in range(WORKERS)]
    count = itertools.count()
    queue: list[tuple[float, int, str, tuple[int, ...]]] = []
    due_s: dict[tuple[int, int], float] = {}
    ttft_ms: dict[tuple[int, int], float] = {}
    for session, start_ms in enumerate(plan.starts_ms):
        at_s = max(0.0, start_ms + float(rng.normal(0.0, START_NOISE_MS))) / 1000
        heapq.heappush(queue, (at_s, next(count), "due", (session, 0)))
    while queue:
        now_s, _, kind, what = heapq.heappop(queue)
        if kind == "due":
            session, turn = what
            due_s[(session, turn)] = now_s
            worker = (session * len(plan.turns[session]) + turn) % WORKERS  # round robin
            request = EngineRequest(f"{session}:{turn}", plan.turns[session][turn], OUTPUT_TOKENS)
            effects = engines[worker].step(now_s, Submitted(request))
        else:
            worker, step = what
            effects = engines[worker].step(now_s, StepEnded(step))
        for effect in effects:
            match effect:
                case StepStarted():
                    noise = mood * float(np.exp(rng.normal(0.0, STEP_NOISE)))
                    ends_s = now_s + (effect.ends_at_s - now_s) * noise
                    heapq.heappush(queue, (ends_s, next(count), "step", (worker, effect.step)))
                case TokenMade(position=0):
                    named = _named(effect.request_id)
                    ttft_ms[named] = (now_s - due_s[named]) * 1000
                case Finished():
                    session, turn = _named(effect.request_id)
                    if turn + 1 < len(plan.turns[session]):
                        heapq.heappush(queue, (now_s + THINK_MS / 1000, next(count), "due", (session, turn + 1)))
                case _:
                    pass
    return ttft_ms


def _named(request_id: str) -> tuple[int, int]:
    session, turn = request_id.split(":")
    return int(session), int(turn)


def pairs(seed: int, *, slower: float, repeats: int = 3) -> list[Pair]:
    """A whole comparison of two arms of the same policy; the candidate is `slower` times as slow."""
    rng = np.random.default_rng(seed)
    plan = SimulatedPlan.of(rng)
    found = []
    for repeat in range(repeats):
        baseline, candidate = run_arm(plan, rng), run_arm(plan, rng, slower=slower)
        found += [
            Pair(repeat, str(session), f"turn {turn}", baseline[(session, turn)], candidate[(session, turn)])
            for session, turn in sorted(baseline)
        ]
    return found
