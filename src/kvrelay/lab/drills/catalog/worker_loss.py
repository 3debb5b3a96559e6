"""Workers that end in the middle of things: at once, or as they are asked to."""

from __future__ import annotations

from kvrelay.lab.drills import promises as hold
from kvrelay.lab.drills.actions import Kill, Start, Terminate
from kvrelay.lab.drills.catalog.traffic import conversation, crowd, history
from kvrelay.lab.drills.drill import Do, Drill, Look, Send, Settle, Setup, Wait, workers

_SEED = 11

WORKER_LOSS = Drill(
    name="worker-loss",
    title="A worker is lost between turns 2 and 3 of a long session",
    why="Health must beat affinity: a conversation goes on elsewhere, with a bounded number of attempts, and a worker "
    "that comes back is believed to hold nothing of its former life.",
    breaks="The process that served the session's second turn is killed, while other requests are on it.",
    group="five",
    covers=("DR-01", "DR-02", "DR-03", "DR-15"),
    setup=Setup(workers=workers(3)),
    steps=(
        Send((*conversation("long", _SEED, 2, every_s=0.2), *crowd("others", 12, seed=1, over_s=0.3))),
        Wait(0.3),
        Send(crowd("busy", 60, seed=2, over_s=0.3, max_tokens=24), blows=((0.15, Kill("home:long")),)),
        Send((*conversation("long", _SEED, 1, first=2), *crowd("after", 12, seed=3, over_s=0.2))),
        Do(Start("struck")),
        Settle(),
        Look("back", texts=(history(_SEED, 2),)),
        Send(crowd("again", 60, seed=4, over_s=0.5)),
        Wait(0.5),
        Look("end", texts=(history(_SEED, 3),)),
    ),
    promises=(
        hold.all_ok(0),
        hold.only_begun_may_break(1),
        hold.all_ok(2),
        hold.served_elsewhere("long-3", "Kill"),
        hold.recovered(),
        hold.nothing_claimed("back", lambda seen: seen.deed("Kill").worker),
        hold.all_ok(3),
        hold.everybody_serves(3),
        hold.claims_are_true("end"),
    ),
)

WORKER_TERM = Drill(
    name="worker-term",
    title="A worker is asked to end while it works",
    why="SIGTERM is how every rollout ends a worker: what it has must be finished, and nobody may notice.",
    breaks="SIGTERM to one worker under load.",
    covers=("OP-11", "DR-15"),
    setup=Setup(workers=workers(3)),
    steps=(
        Send(crowd("busy", 60, seed=21, over_s=0.4, max_tokens=24), blows=((0.2, Terminate("w1")),)),
        Wait(1.0),
        Send(crowd("after", 30, seed=22, over_s=0.2)),
        Do(Start("struck")),
        Settle(),
        Send(crowd("again", 60, seed=23, over_s=0.5)),
        Wait(0.3),
        Look("end"),
    ),
    promises=(hold.all_ok(0), hold.all_ok(1), hold.recovered(), hold.all_ok(2), hold.everybody_serves(2)),
)

DRILLS = (WORKER_LOSS, WORKER_TERM)
