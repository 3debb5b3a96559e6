"""The tier that workers share: out of reach, spoilt, emptied, or of another version."""

from __future__ import annotations

from kvrelay.lab.drills import promises as hold
from kvrelay.lab.drills.actions import CountReads, ForgetCaches, SpoilStore, StoreDown, StoreUp, WipeStore
from kvrelay.lab.drills.drill import (
    Do,
    Drill,
    Look,
    Promise,
    Send,
    Settle,
    Setup,
    StorePlan,
    Turn,
    Wait,
    WorkerPlan,
    workers,
)
from kvrelay.lab.drills.fleets.shared_store import DEADLINE_MS, MAX_FETCHES
from kvrelay.lab.drills.history import Finding, History, found
from kvrelay.lab.drills.prompts import text

_TEXTS, _TOKENS, _APART_S = 6, 330, 0.5
_BOUND_MS = 4 * DEADLINE_MS + 1000.0  # a look-up, a fetch, as often again, and a busy machine
_WORKERS = 2


def _pairs(name: str, seed: int, *, texts: int = _TEXTS) -> tuple[Turn, ...]:
    """Each prompt twice in a row: round robin brings the second one to the other worker."""
    return tuple(
        Turn(id=f"{name}-{number}-{time}", text=text(seed + number, _TOKENS), at_s=_APART_S * (2 * number + time))
        for number in range(texts)
        for time in range(2)
    )


def _once(name: str, seed: int, count: int) -> tuple[Turn, ...]:
    return tuple(
        Turn(id=f"{name}-{number}", text=text(seed + number, _TOKENS), at_s=_APART_S * number)
        for number in range(count)
    )


def _seconds(seen: History, step: int) -> list[int | None]:
    """Tokens that the second of each pair found, where it came to another worker than the first."""
    first = {_prompt_of(o.id): o.worker for o in seen.outcomes if o.step < step or o.id.endswith("-0")}
    seconds = [outcome for outcome in seen.of_step(step) if outcome.id.endswith("-1")]
    return [o.cached_tokens for o in seconds if o.worker is None or o.worker != first.get(_prompt_of(o.id))]


def _prompt_of(turn: str) -> str:
    """Turns with one prompt: with-3-0 and with-3-1; one-3 and two-3-1."""
    name, number, *_ = turn.split("-") if "-" in turn else (turn, "")
    return f"{'one' if name == 'two' else name}-{number}"


def _loaded(step: int) -> Promise:
    """What one worker computed, the other loads."""

    def judge(seen: History) -> Finding:
        hits = _seconds(seen, step)
        if None in hits:
            return found(None, f"hits are {hold.NOT_OBSERVED}")
        if not hits:
            return found(None, "no prompt came to another worker than the one that had it")
        with_any = sum(bool(hit) for hit in hits)
        return found(with_any >= len(hits) / 2, f"{with_any} of {len(hits)} prompts loaded by the other worker: {hits}")

    return Promise(f"what one worker computed, the other loads (part {step + 1})", judge)


def _computed(step: int) -> Promise:
    """Nothing is loaded, everything is computed."""

    def judge(seen: History) -> Finding:
        hits = _seconds(seen, step)
        if None in hits:
            return found(None, f"hits are {hold.NOT_OBSERVED}")
        return found(not any(hits), f"tokens loaded: {hits}")

    return Promise(f"nothing is loaded, and everything is computed (part {step + 1})", judge)


def _bounded(step: int) -> Promise:
    """No request waits for the store longer than its deadlines allow."""

    def judge(seen: History) -> Finding:
        times = [
            (o.ended_s - o.sent_s) * 1000 for o in seen.of_step(step) if o.ended_s is not None and o.sent_s is not None
        ]
        if not times:
            return found(None, f"times are {hold.NOT_OBSERVED}")
        return found(
            max(times) < _BOUND_MS, f"longest of {len(times)} requests: {max(times):.0f} ms (bound {_BOUND_MS:.0f})"
        )

    return Promise(f"no request waits beyond the deadlines (part {step + 1})", judge)


def _refused_in_time(seen: History) -> Finding:
    """By the policy `fail` a request that needs the store is an error, at once."""
    turns = seen.of_step(1)
    errors = sum(outcome.ending in ("refused", "broken") and not outcome.text for outcome in turns)
    return found(errors == len(turns), f"{errors} of {len(turns)} ended with an error and without an answer")


def _outage(name: str, plan: StorePlan, how: str, during: tuple[Promise, ...], words: str) -> Drill:
    return Drill(
        name=name,
        title=f"The shared tier is out of reach: {words}",
        why="A cache is no reason to be down. What happens without it is declared, bounded, and over when it is back.",
        breaks="Nobody listens at the store any more." if how == "refuse" else "The store accepts and never answers.",
        group="five",
        covers=("DR-09",),
        setup=Setup(workers=workers(_WORKERS), policy="round_robin", store=plan, retry_attempts=2),
        steps=(
            Send(_pairs("with", 1000)),
            Do(StoreDown(how)),  # type: ignore[arg-type]
            Send(_pairs("without", 2000)),
            Do(StoreUp()),
            Wait(4.0),
            Settle(within_s=40.0),  # whose requests failed is tried again after half a minute at the latest
            Send(_pairs("again", 3000)),
            Wait(0.5),
            Look("end"),
        ),
        promises=(hold.all_ok(0), _loaded(0), *during, _bounded(1), hold.all_ok(2), _loaded(2)),
    )


_COMPUTES = (hold.all_ok(1), _computed(1))
OUTAGES = (
    _outage("store-outage", StorePlan(), "refuse", _COMPUTES, "recompute"),
    _outage("store-stall", StorePlan(), "stall", _COMPUTES, "recompute, and it does not even say no"),
    _outage(
        "store-outage-fail",
        StorePlan(failure_policy="fail"),
        "refuse",
        (Promise("every request that needs it is an error, at once", _refused_in_time),),
        "fail",
    ),
    _outage(
        "store-outage-fallback",
        StorePlan(failure_policy="fallback", below=True),
        "refuse",
        (hold.all_ok(1), _loaded(1)),
        "fall back to the tier below",
    ),
)

_CROWD_TEXTS, _CROWD_TIMES, _WANTED_EVERY_S = 18, 8, 0.12


def _wanted_by_many() -> tuple[Turn, ...]:
    """Each stored prompt by eight clients at once, one prompt after the other, from the outage to well after it."""
    return tuple(
        Turn(
            id=f"herd-{number}-{time}", text=text(4000 + number, _TOKENS), at_s=_WANTED_EVERY_S * number + 0.001 * time
        )
        for number in range(_CROWD_TEXTS)
        for time in range(_CROWD_TIMES)
    )


def _no_herd(seen: History) -> Finding:
    store = seen.view("end").store
    if store is None:
        return found(None, f"reads of the store are {hold.NOT_OBSERVED}")
    most, of_one = store["most_reads_at_once"], store["most_reads_of_one"]
    if not most:
        return found(None, "nothing was read after the outage, so there was no herd to be seen")
    ok = most <= MAX_FETCHES * _WORKERS and of_one <= 2 * _WORKERS
    return found(ok, f"at most {most} reads at once (cap {MAX_FETCHES} per worker), at most {of_one} of one object")


STORE_HERD = Drill(
    name="store-herd",
    title="Everybody wants the store the moment it is back",
    why="An outage ends for all workers at once. Who then asks for everything at once brings it down again.",
    breaks="The store is out of reach, its objects are wanted by 144 requests, and it comes back among them.",
    group="five",
    covers=("DR-10",),
    setup=Setup(workers=workers(_WORKERS), policy="round_robin", store=StorePlan()),
    steps=(
        Send(_once("fill", 4000, _CROWD_TEXTS)),
        Wait(1.0),
        Do(ForgetCaches()),
        Do(StoreDown()),
        Wait(0.5),
        Do(CountReads()),
        Send(_wanted_by_many(), blows=((0.3, StoreUp()),)),
        Wait(1.0),
        Send(tuple(Turn(id=f"late-{n}", text=text(4000 + n, _TOKENS), at_s=0.001 * n) for n in range(_CROWD_TEXTS))),
        Wait(0.3),
        Look("end"),
    ),
    promises=(hold.all_ok(0), hold.all_ok(1), hold.all_ok(2), Promise("no thundering herd", _no_herd)),
)


def _spoilt(name: str, title: str, why: str, action: SpoilStore | WipeStore, breaks: str) -> Drill:
    return Drill(
        name=name,
        title=title,
        why=why,
        breaks=breaks,
        group="modes",
        covers=("DR-14", "SG-16"),
        setup=Setup(workers=workers(_WORKERS), policy="round_robin", store=StorePlan()),
        steps=(
            Send(_pairs("whole", 5000)),
            Send(_once("one", 6000, _TEXTS)),
            Wait(0.5),  # an answer is over before its KV is stored
            Do(action),
            # an odd one between turns the order of workers round: each prompt comes to the one that lacks it
            Send((Turn(id="odd", text=text(7, 40)),)),
            Send(tuple(Turn(id=f"two-{n}-1", text=text(6000 + n, _TOKENS), at_s=_APART_S * n) for n in range(_TEXTS))),
            Do(StoreUp()),
            Wait(1.5),
            Send(_pairs("after", 7000)),
            Wait(0.3),
            Look("end"),
        ),
        promises=(hold.all_ok(0), _loaded(0), hold.all_ok(3), _computed(3), _bounded(3), hold.all_ok(4), _loaded(4)),
    )


MODES = (
    _spoilt(
        "store-phantom",
        "The store knows objects that are not there",
        "Metadata without its object is a promise that nobody keeps; believing it must cost a look, not an answer.",
        SpoilStore("phantom"),
        "Sizes are answered as before, and every read finds nothing.",
    ),
    _spoilt(
        "store-partial",
        "Objects are only half there",
        "KV with layers missing is worse than none: it is all or nothing.",
        SpoilStore("truncated"),
        "Every read answers half of the object.",
    ),
    _spoilt(
        "store-damaged",
        "Objects are damaged",
        "One wrong bit gives wrong answers with a clear conscience. Nothing is ready that was not verified.",
        SpoilStore("damaged"),
        "Every read has one bit turned.",
    ),
    _spoilt(
        "store-emptied",
        "The store comes back with its index lost",
        "A restart without its disk: whoever believed in its objects must find out harmlessly.",
        WipeStore(),
        "All objects and their index are gone.",
    ),
)


def _of_own_revision(seen: History) -> Finding:
    hits = _seconds(seen, 0)
    if None in hits:
        return found(None, f"hits are {hold.NOT_OBSERVED}")
    store = seen.view("end").store
    objects = None if store is None else store["objects"]
    return found(not any(hits), f"tokens loaded from the other revision: {hits}; {objects} objects in the store")


REVISIONS = Drill(
    name="store-revisions",
    title="Two revisions of a model share one store",
    why="Their blocks have the same tokens, the same model name and another content: only the contract tells.",
    breaks="Nothing: two workers under one name compute with different weights, and store into one place.",
    group="modes",
    covers=("DR-14", "SG-21", "OP-04"),
    setup=Setup(
        workers=(WorkerPlan(name="w0"), WorkerPlan(name="w1", revision="v2")), policy="round_robin", store=StorePlan()
    ),
    steps=(Send(_pairs("mixed", 8000, texts=8)), Wait(0.5), Look("end")),
    promises=(hold.all_ok(0), Promise("nothing of the other revision is loaded", _of_own_revision)),
)


def _nothing_left(seen: History) -> Finding:
    left = sum(outcome.ending == "left" for outcome in seen.of_step(1))
    hits = [outcome.cached_tokens for outcome in seen.of_step(2)]
    if None in hits:
        return found(None, f"hits are {hold.NOT_OBSERVED}")
    return found(left > 0, f"{left} clients left in the middle; afterwards their prompts hit {hits}")


_IMPATIENT = tuple(
    Turn(id=f"gone-{n}", text=text(9000 + n, 1200), at_s=0.05 * n, max_tokens=64, leaves_after_s=0.01 + 0.012 * (n % 5))
    for n in range(20)
)

ORPHANS = Drill(
    name="store-orphans",
    title="Clients leave while their KV is on its way",
    why="What a cancelled request left behind, half loaded or half stored, must neither be used nor be kept for ever.",
    breaks="Twenty clients leave within milliseconds, in the middle of loads, prefills and saves.",
    group="modes",
    covers=("DR-14",),
    setup=Setup(workers=workers(_WORKERS), policy="round_robin", store=StorePlan()),
    steps=(
        Send(tuple(Turn(id=f"known-{n}", text=text(9000 + n, 600), at_s=_APART_S * n) for n in range(0, 20, 4))),
        Send(_IMPATIENT),
        Wait(1.5),
        Send(tuple(Turn(id=f"back-{n}", text=text(9000 + n, 1200), at_s=_APART_S * n) for n in range(20))),
        Wait(0.5),
        Look("end"),
    ),
    promises=(hold.all_ok(0), hold.all_ok(2), Promise("clients left, and what they left harms nobody", _nothing_left)),
)

DRILLS = (*OUTAGES, STORE_HERD, *MODES, REVISIONS, ORPHANS)
