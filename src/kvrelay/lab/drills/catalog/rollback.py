"""The way back itself: one command, in the middle of traffic."""

from __future__ import annotations

from collections import Counter

from kvrelay.lab.drills import promises as hold
from kvrelay.lab.drills.actions import CountReads, ForgetCaches, Rollback
from kvrelay.lab.drills.catalog.traffic import crowd
from kvrelay.lab.drills.drill import Do, Drill, Look, Promise, Send, Setup, StorePlan, Turn, Wait, workers
from kvrelay.lab.drills.history import Finding, History, found
from kvrelay.lab.drills.prompts import text

_KNOWN = tuple(text(1310 + number, 330) for number in range(6))


def _asked_for(name: str) -> tuple[Turn, ...]:
    return tuple(Turn(id=f"{name}-{number}", text=said, at_s=0.3 * number) for number, said in enumerate(_KNOWN))


def _loads_before(seen: History) -> Finding:
    hits = [outcome.cached_tokens for outcome in seen.of_step(1)]
    if None in hits:
        return found(None, f"hits are {hold.NOT_OBSERVED}")
    loaded = sum(map(bool, hits))  # one that came too late is no matter of this drill
    return found(loaded > len(hits) / 2, f"tokens that emptied workers hit before the rollback: {hits}")


def _round_robin(seen: History) -> Finding:
    late = [outcome for outcome in seen.of_step(3) if outcome.receipt is not None]
    if not late:
        return found(None, f"policies are {hold.NOT_OBSERVED}")
    policies = {outcome.receipt.policy for outcome in late if outcome.receipt is not None}
    shares = Counter(outcome.worker for outcome in late)
    even = max(shares.values()) - min(shares.values()) <= 1
    return found(policies == {"round_robin"} and even, f"policies {sorted(policies)}, shares {dict(shares)}")


def _own_caches_only(seen: History) -> Finding:
    before, after = seen.view("back").store, seen.view("end").store
    hits = [seen.outcome(turn.id).cached_tokens for turn in _asked_for("plain")]
    if before is None or after is None or None in hits:
        return found(None, f"what is read from the store, or hit, is {hold.NOT_OBSERVED}")
    written = after["objects"] - before["objects"]
    return found(
        not after["reads"] and not written and not any(hits),
        f"after it {after['reads']} objects were read and {written} written; tokens of stored prompts hit: {hits}",
    )


ROLLBACK = Drill(
    name="rollback",
    title="Back to round robin and to the workers' own caches with one command",
    why="Whatever goes wrong with a clever policy or a shared tier: the way back must be one step, and lose nothing.",
    breaks="`kvrelay rollback` in the middle of traffic. Then caches are emptied, and what the store has is asked for.",
    covers=("RT-30",),
    setup=Setup(workers=workers(2), store=StorePlan()),
    steps=(
        Send(_asked_for("first")),
        Wait(1.0),
        Do(ForgetCaches()),
        Send(_asked_for("loaded")),
        Send(crowd("clever", 60, seed=131, over_s=0.4, max_tokens=16), blows=((0.2, Rollback()),)),
        Wait(1.5),
        Do(ForgetCaches()),
        Do(CountReads()),
        Look("back"),
        Send((*_asked_for("plain"), *crowd("more", 30, seed=132, over_s=0.3))),
        Wait(1.0),
        Look("end"),
    ),
    promises=(
        hold.all_ok(0),
        hold.all_ok(1),
        hold.all_ok(2),
        hold.all_ok(3),
        Promise("before, the shared tier is in use", _loads_before),
        Promise("from then on round robin decides, evenly", _round_robin),
        Promise("from then on no byte of the shared tier is used, and none is added", _own_caches_only),
    ),
)

DRILLS = (ROLLBACK,)
