"""One prefix that most of the fleet's requests begin with."""

from __future__ import annotations

from kvrelay.core.stats.distribution import distribution
from kvrelay.lab.drills import promises as hold
from kvrelay.lab.drills.actions import ForgetCaches, SetPolicy
from kvrelay.lab.drills.catalog.traffic import crowd
from kvrelay.lab.drills.drill import Do, Drill, Look, Promise, Send, Setup, Turn, Wait, workers
from kvrelay.lab.drills.history import Finding, History, found
from kvrelay.lab.drills.prompts import text

_HOT = text(31, 1600)
_REQUESTS, _SHARE, _OVER_S = 100, 0.8, 2.0
_SESSIONS = 20
_COLD_REQUESTS = 20  # the first ones find empty caches, as under any policy


def _arm(name: str) -> tuple[Turn, ...]:
    """Twenty clients take turns, so that a sticky policy has sessions to stick to."""
    turns = crowd(name, _REQUESTS, seed=32, over_s=_OVER_S, tokens=320, shared=_HOT, shared_share=_SHARE)
    return tuple(
        Turn(id=turn.id, text=turn.text, at_s=turn.at_s, session=f"{name}-{number % _SESSIONS}", max_tokens=4)
        for number, turn in enumerate(turns)
    )


def _ratio_is_exact(history: History) -> Finding:
    """Seen in what was sent: lengths tell hot prompts from others."""
    shares = []
    for step in (0, 1):
        turns = history.of_step(step)
        shares.append(sum(outcome.prompt_tokens > _HOT.tokens for outcome in turns) / len(turns))
    return found(
        shares == [_SHARE, _SHARE], f"{shares[0]:.0%} and {shares[1]:.0%} of the requests begin with the hot prefix"
    )


def _compared(history: History) -> Finding:
    figures = []
    for step in (0, 1):
        outcomes = history.of_step(step)[_COLD_REQUESTS:]
        times = distribution([outcome.ttft_ms for outcome in outcomes if outcome.ttft_ms is not None])
        p50, p95 = times.p50, times.p95
        queues = [o.receipt.worker_queue_at_route or 0 for o in outcomes if o.receipt is not None]
        if p50 is None or p95 is None:
            return found(None, f"times are {hold.NOT_OBSERVED}")
        figures.append((p50, p95, max(queues, default=0), len(outcomes)))
    (sticky_p50, sticky_p95, sticky_queue, count), (p50, p95, queue, _) = figures
    observed = (
        f"TTFT ms p50/p95 of {count}: sticky {sticky_p50:.1f}/{sticky_p95:.1f}, cache_load {p50:.1f}/{p95:.1f}; "
        f"longest queue met: {sticky_queue} and {queue}"
    )
    return found(p95 <= sticky_p95 * 2 and p50 <= sticky_p50 * 1.5, observed)


def _spread(history: History) -> Finding:
    served = [outcome.worker for outcome in history.of_step(1) if outcome.worker is not None]
    if not served:
        return found(None, f"who served is {hold.NOT_OBSERVED}")
    most = max(served.count(worker) for worker in set(served))
    return found(most < len(served) * 0.9, f"{len(set(served))} workers served; the busiest {most} of {len(served)}")


HOT_PREFIX = Drill(
    name="hot-prefix",
    title="80 % of the requests share one prefix",
    why="A policy that goes by the cache alone sends them all to one worker, where they queue for what they save.",
    breaks="Nothing: the traffic is the blow. The same arrivals under `sticky` and `cache_load`, on empty caches.",
    group="five",
    covers=("DR-04", "DR-15"),
    setup=Setup(workers=workers(4), policy="sticky", prefill_tokens_per_s=20_000.0),
    steps=(
        Send(_arm("sticky")),
        Wait(0.5),
        Do(ForgetCaches()),
        Do(SetPolicy("cache_load")),
        Send(_arm("scored")),
        Wait(0.5),
        Look("end", texts=(_HOT,)),
    ),
    promises=(
        hold.all_ok(0),
        hold.all_ok(1),
        Promise("exactly 80 % share the prefix", _ratio_is_exact),
        Promise("cache_load's times are in reach of sticky's: p50 at most 1.5, p95 at most 2 times", _compared),
        Promise("the hot prefix does not end on one worker", _spread),
        hold.claims_are_true("end"),
    ),
)

DRILLS = (HOT_PREFIX,)
