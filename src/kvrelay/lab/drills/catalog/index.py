"""The gateway's knowledge of what lies where: restarts of the gateway, and event streams with holes."""

from __future__ import annotations

from kvrelay.lab.drills import promises as hold
from kvrelay.lab.drills.actions import (
    DoubleEvents,
    Kill,
    LoseEvents,
    MendEvents,
    RestartGateway,
    ShuffleEvents,
    SilenceReplay,
    Start,
)
from kvrelay.lab.drills.catalog.traffic import conversation, crowd, history, repeated
from kvrelay.lab.drills.drill import Do, Drill, Look, Promise, Send, Settle, Setup, Wait, workers
from kvrelay.lab.drills.history import Finding, History, found

_SEED = 41
_GAP_SETUP = Setup(workers=workers(2))


def _lives_on(seen: History) -> Finding:
    """The restarted gateway serves the next turn from what the workers kept."""
    outcome = seen.outcome("kept-3")
    if outcome.cached_tokens is None:
        return found(None, f"hits are {hold.NOT_OBSERVED}")
    wanted = history(_SEED, 2).tokens // 2
    return found(outcome.cached_tokens >= wanted, f"{outcome.cached_tokens} of {outcome.prompt_tokens} tokens hit")


GATEWAY_RESTART = Drill(
    name="gateway-restart",
    title="The gateway restarts, the workers stay",
    why="What the workers hold outlives the gateway. It must learn it anew, and may claim nothing else.",
    breaks="The gateway's process is killed and started again while requests are open.",
    group="five",
    covers=("DR-05",),
    setup=Setup(workers=workers(3)),
    steps=(
        Send((*conversation("kept", _SEED, 2, every_s=0.2), *crowd("before", 20, seed=42, over_s=0.4))),
        Wait(0.3),
        Send(crowd("open", 20, seed=43, over_s=0.2, max_tokens=48), blows=((0.1, RestartGateway()),)),
        Settle(),
        Wait(0.5),
        Look("learned", texts=(history(_SEED, 2),)),
        Send((*conversation("kept", _SEED, 1, first=2), *crowd("after", 40, seed=44, over_s=0.4))),
        Wait(0.3),
        Look("end", texts=(history(_SEED, 3),)),
    ),
    promises=(
        hold.all_ok(0),
        hold.recovered(),
        hold.claims_are_true("learned"),
        hold.all_ok(2),
        Promise("the next turn meets what was computed before the restart", _lives_on),
        hold.everybody_serves(2),
        hold.claims_are_true("end"),
    ),
)

_TURN_ONE = (Send(conversation("gap", _SEED, 1)), Wait(0.3))
_LOSE_ITS_NEXT = (
    Do(LoseEvents("home:gap", batches=1)),
    Send(conversation("gap", _SEED, 1, first=1)),
    Wait(0.3),
    Send(conversation("gap", _SEED, 1, first=2)),  # whose event has the number that shows the hole
)

GAP_INNER = Drill(
    name="gap-inner",
    title="An event in the middle of the stream is lost",
    why="The next number shows the hole; what is missing is asked for, and the index equals the truth again.",
    breaks="One event batch of a worker is dropped, later ones arrive.",
    group="five",
    covers=("DR-06", "DR-13", "DR-14"),
    setup=_GAP_SETUP,
    steps=(
        *_TURN_ONE,
        *_LOSE_ITS_NEXT,
        Wait(1.0),
        Look("end", texts=(history(_SEED, 3),)),
    ),
    promises=(
        hold.all_ok(0),
        hold.all_ok(1),
        hold.all_ok(2),
        hold.reported("event_gap", "end"),
        hold.claims_are_true("end"),
    ),
)

GAP_UNFILLED = Drill(
    name="gap-unfilled",
    title="An event is lost and nobody can say it again",
    why="Belief with an unknown hole is worth nothing: it is dropped, said to be incomplete, and never claimed.",
    breaks="One event batch is dropped and requests for it get no answer.",
    group="five",
    covers=("DR-06",),
    setup=_GAP_SETUP,
    steps=(
        *_TURN_ONE,
        Do(SilenceReplay("home:gap")),
        *_LOSE_ITS_NEXT,
        Wait(8.0),
        Look("dropped", texts=(history(_SEED, 3),)),
        Do(MendEvents("struck")),
        Do(Start("struck")),
        Settle(),
        Send(conversation("gap", _SEED, 1, first=3)),
        Wait(0.5),
        Look("end", texts=(history(_SEED, 4),)),
    ),
    promises=(
        hold.all_ok(2),
        hold.reported("event_gap_lost", "dropped"),
        hold.claims_are_safe("dropped"),
        hold.recovered(),
        hold.all_ok(3),
        hold.claims_are_true("end"),
    ),
)

GAP_TAIL = Drill(
    name="gap-tail",
    title="The newest event is lost",
    why="No number shows it. The drill must find it undetected first; then outcomes that contradict the claims, or "
    "a word of the worker's agent, bring it to light.",
    breaks="Everything that a worker publishes is dropped for a while; nothing follows.",
    group="five",
    covers=("DR-07",),
    setup=Setup(workers=workers(1)),
    steps=(
        Send(conversation("tail", _SEED, 1)),
        Wait(0.3),
        Do(LoseEvents("home:tail")),
        Send(conversation("tail", _SEED, 4, first=1, every_s=0.1)),
        Wait(0.3),
        Do(MendEvents("struck")),
        Look("unseen", texts=(history(_SEED, 5),)),
        Send(repeated("again", (history(_SEED, 5),), times=40, every_s=0.05)),
        Wait(1.0),
        Look("end", texts=(history(_SEED, 5),)),
    ),
    promises=(
        hold.all_ok(1),
        hold.claims_are_wrong("unseen"),
        hold.all_ok(2),
        hold.reported("tail_drift", "end"),
        hold.claims_are_true("end"),
    ),
)


def _nothing_kept(seen: History) -> Finding:
    dead = seen.view("dead").worker(seen.deed("Kill").worker or "")
    if dead is None:
        return found(True, "it is no longer known")
    if dead.index_blocks is None:
        return found(None, f"its index is {hold.NOT_OBSERVED}")
    return found(not dead.index_blocks and not dead.routable, f"{dead.index_blocks} blocks, routable: {dead.routable}")


GAP_DEAD = Drill(
    name="gap-dead",
    title="A worker dies with a hole in its stream",
    why="A snapshot is no backup: of a worker that is gone nothing can be learned, so nobody asks again and again.",
    breaks="One event batch is dropped, requests for it get no answer, and then the worker is killed.",
    group="five",
    covers=("DR-08",),
    setup=_GAP_SETUP,
    steps=(
        *_TURN_ONE,
        Do(SilenceReplay("home:gap")),
        *_LOSE_ITS_NEXT,
        Do(Kill("struck")),
        Wait(8.0),
        Look("dead"),
        Send(conversation("gap", _SEED, 1, first=3)),
        Wait(0.3),
        Look("end", texts=(history(_SEED, 4),)),
    ),
    promises=(
        hold.all_ok(2),
        Promise("nothing of the dead worker is kept", _nothing_kept),
        hold.reported("event_gap", "end", at_least=1, at_most=1),
        hold.reported("event_gap_lost", "end", at_least=1, at_most=1),
        hold.all_ok(3),
        hold.served_elsewhere("gap-4", "Kill"),
        hold.claims_are_safe("end"),
    ),
)


_TALKS = tuple(conversation(f"talk{number}", 50 + number, 4, every_s=0.15) for number in range(6))

EVENTS_DISORDERED = Drill(
    name="events-disordered",
    title="Events come twice and out of order",
    why="Events are fire and forget. Counting one twice invents blocks, taking one early loses them.",
    breaks="One worker's batches come twice, another's overtake each other, a third's do both.",
    covers=("DR-13",),
    setup=Setup(workers=workers(3)),
    steps=(
        Do(DoubleEvents("w0")),
        Do(ShuffleEvents("w1")),
        Do(ShuffleEvents("w2")),
        Do(DoubleEvents("w2")),
        Send(tuple(turn for talk in _TALKS for turn in talk)),
        *(Do(MendEvents(name)) for name in ("w0", "w1", "w2")),
        Wait(0.5),
        Send(crowd("after", 30, seed=61, over_s=0.3)),
        Wait(1.0),
        Look("end", texts=tuple(history(50 + number, 4) for number in range(6))),
    ),
    promises=(
        hold.all_ok(0),
        hold.all_ok(1),
        hold.reported("event_duplicate", "end"),
        hold.claims_are_true("end"),
    ),
)

DRILLS = (GATEWAY_RESTART, GAP_INNER, GAP_UNFILLED, GAP_TAIL, GAP_DEAD, EVENTS_DISORDERED)
