"""The path between the gateway and its workers, and the machine that the gateway runs on."""

from __future__ import annotations

from kvrelay.lab.drills import promises as hold
from kvrelay.lab.drills.actions import MendNetwork, Partition, Pause, Slow
from kvrelay.lab.drills.catalog.traffic import conversation, crowd, history
from kvrelay.lab.drills.drill import Do, Drill, Look, Promise, Send, Settle, Setup, Wait, workers
from kvrelay.lab.drills.history import Finding, History, found

_UNTIL_TRIED_AGAIN_S = 11.0  # a worker that was slow is avoided for ten seconds

PARTITION = Drill(
    name="partition",
    title="The network between the gateway and a worker is cut",
    why="Nobody is told: connections stay open and nothing comes. Nobody may wait for who cannot answer.",
    breaks="Every byte between the gateway and one worker is held back, under load.",
    covers=("DR-15",),
    setup=Setup(workers=workers(3), first_byte_s=3.0, idle_s=2.0),
    steps=(
        Send(crowd("calm", 20, seed=91, over_s=0.2)),
        Send(crowd("cut", 80, seed=92, over_s=0.6, max_tokens=16), blows=((0.2, Partition("w1")),)),
        Wait(1.0),
        Send(crowd("without", 30, seed=93, over_s=0.3)),
        Do(MendNetwork("struck")),
        Settle(),
        Wait(1.0),
        Send(crowd("again", 60, seed=94, over_s=0.5)),
        Wait(1.0),
        Look("end", texts=(crowd("again", 60, seed=94, over_s=0.5)[0].text,)),
    ),
    promises=(
        hold.all_ok(0),
        hold.only_begun_may_break(1),
        hold.all_ok(2),
        hold.recovered(),
        hold.all_ok(3),
        hold.everybody_serves(3),
        hold.claims_are_true("end"),
    ),
)

SLOW_NETWORK = Drill(
    name="slow-network",
    title="One worker is far away all of a sudden",
    why="Slow is not dead: nothing may be retried, nothing may fail, and nobody is given up.",
    breaks="200 ms more for every message between the gateway and one worker.",
    covers=("DR-15",),
    setup=Setup(workers=workers(3)),
    steps=(
        Do(Slow("w2", 0.2)),
        Send(crowd("slow", 60, seed=101, over_s=0.6)),
        Do(MendNetwork("w2")),
        Settle(),
        Wait(_UNTIL_TRIED_AGAIN_S),
        Send(crowd("again", 60, seed=102, over_s=0.5)),
        Wait(0.5),
        Look("end", texts=(crowd("slow", 60, seed=101, over_s=0.6)[0].text,)),
    ),
    promises=(
        hold.all_ok(0),
        Promise("no attempt fails", lambda seen: _one_attempt_each(seen, 0)),
        hold.recovered(),
        hold.all_ok(1),
        hold.everybody_serves(1),
        hold.claims_are_true("end"),
    ),
)


def _one_attempt_each(seen: History, step: int) -> Finding:
    receipts = [outcome.receipt for outcome in seen.of_step(step) if outcome.receipt is not None]
    if not receipts:
        return found(None, f"attempts are {hold.NOT_OBSERVED}")
    more = [receipt.request_id for receipt in receipts if len(receipt.attempts) != 1]
    return found(not more, f"{len(receipts)} requests; with another number of attempts than one: {more[:4] or 'none'}")


CLOCK_JUMP = Drill(
    name="clock-jump",
    title="The gateway stands still, and the clock jumps for it",
    why="Suspended machines, live migration, a stopped container: all deadlines are over at once, and what was "
    "well may not break.",
    breaks="The gateway's process is stopped for 2.5 seconds and goes on.",
    setup=Setup(workers=workers(2)),
    steps=(
        Send(
            (*conversation("calm", 111, 2, every_s=0.2), *crowd("across", 30, seed=113, over_s=0.4)),
            blows=((0.3, Pause(2.5)),),
        ),
        Settle(),
        Wait(0.5),
        Send((*conversation("calm", 111, 1, first=2), *crowd("after", 40, seed=112, over_s=0.4))),
        Wait(0.5),
        Look("end", texts=(history(111, 3),)),
    ),
    promises=(
        hold.all_ok(0),
        hold.recovered(),
        hold.all_ok(1),
        hold.everybody_serves(1),
        hold.claims_are_true("end"),
    ),
)


def _receipts_elsewhere(seen: History) -> Finding:
    dropped, at_hand = seen.receipts_dropped, seen.notes.get("receipts_at_hand")
    if dropped is None or at_hand is None:
        return found(None, f"the receipt log is {hold.NOT_OBSERVED}")
    return found(dropped > 0 and at_hand > 0, f"{dropped} counted as lost, {at_hand} still to be asked for")


DISK_FULL = Drill(
    name="disk-full",
    title="The disk for receipts is full",
    why="Evidence is not worth a request: clients are served, and what could not be written is counted.",
    breaks="Every write of the receipt file fails with `no space left on device`.",
    setup=Setup(workers=workers(2), receipts_on_full_disk=True),
    steps=(Send(crowd("full", 60, seed=121, over_s=0.4)), Wait(1.0), Look("end")),
    promises=(
        hold.all_ok(0),
        Promise("lost receipts are counted, the last ones are still at hand", _receipts_elsewhere),
    ),
)


DRILLS = (PARTITION, SLOW_NETWORK, CLOCK_JUMP, DISK_FULL)
