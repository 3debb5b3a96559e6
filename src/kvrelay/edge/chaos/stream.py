"""What a script does to a stream of event batches: batches and times in, batches to send out. Pure, so reproducible.

A stream is one topic; several workers may come through one proxy, and each has its own numbers.
"""

from __future__ import annotations

import heapq
import itertools

from msgspec import Struct

from kvrelay.edge.chaos.script import (
    Clear,
    Delay,
    Drop,
    DropTail,
    Duplicate,
    EventFault,
    Hold,
    Instruction,
    Release,
    Reorder,
)


class Batch(Struct, frozen=True):
    """One message of the event socket."""

    topic: bytes
    seq: int
    frames: tuple[bytes, ...]


class Action(Struct, frozen=True, omit_defaults=True):
    """One thing that was done, for the record; `copies` counts what was sent."""

    action: str
    topic: str = ""
    seq: int | None = None
    copies: int = 0
    detail: str = ""


class Done(Struct, frozen=True):
    """The outcome of one input: what to send now, in order, and what to write down."""

    send: tuple[Batch, ...] = ()
    actions: tuple[Action, ...] = ()

    def __add__(self, other: Done) -> Done:
        return Done(self.send + other.send, self.actions + other.actions)


class FaultyStream:
    """Instructions may be added at any time; they count for batches that arrive from then on."""

    def __init__(self) -> None:
        self._faults: list[EventFault] = []
        self._drops_tail = False
        self._held: list[tuple[int | None, Batch]] = []  # until which number passed, or until `release`
        self._delayed: list[tuple[float, int, Batch]] = []  # a heap: due, order of arrival
        self._arrivals = itertools.count()
        self._newest: dict[bytes, Done] = {}  # per topic, while the tail is dropped: what would have gone out

    def instruct(self, instruction: Instruction) -> Done:
        match instruction:
            case Release():
                return self._release()
            case Clear():
                self._faults.clear()
                self._drops_tail = False
                return self._release()
            case DropTail():
                self._drops_tail = True
            case Drop() | Delay() | Duplicate() | Reorder() | Hold():
                self._faults.append(instruction)
        return Done()

    def arrived(self, now: float, batch: Batch) -> Done:
        """A batch came from the worker."""
        done = self._treat(now, batch)
        freed = tuple(held for until, held in self._held if until == batch.seq and held.topic == batch.topic)
        self._held = [entry for entry in self._held if entry[1] not in freed]
        for held in freed:
            done += self._pass(held, "release", detail=f"after {batch.seq}")
        return done

    def due(self, now: float) -> Done:
        """Delays are over."""
        done = Done()
        while self._delayed and self._delayed[0][0] <= now:
            done += self._pass(heapq.heappop(self._delayed)[2], "release", detail="delay over")
        return done

    def next_due(self) -> float | None:
        return self._delayed[0][0] if self._delayed else None

    def withheld(self) -> int:
        """Batches that came and were neither sent nor dropped."""
        return len(self._held) + len(self._delayed) + len(self._newest)

    def _treat(self, now: float, batch: Batch) -> Done:
        fault = next((fault for fault in self._faults if _names(fault, batch.seq)), None)
        match fault:
            case None:
                return self._pass(batch, "pass")
            case Drop():
                return Done((), (_note("drop", batch),))
            case Duplicate():
                return self._pass(batch, "duplicate", copies=fault.copies)
            case Delay():
                heapq.heappush(self._delayed, (now + fault.by_s, next(self._arrivals), batch))
                return Done((), (_note("delay", batch, detail=f"{fault.by_s:g} s"),))
            case Reorder():
                self._held.append((fault.after, batch))
                return Done((), (_note("reorder", batch, detail=f"after {fault.after}"),))
            case Hold():
                self._held.append((fault.until, batch))
                until = "release" if fault.until is None else fault.until
                return Done((), (_note("hold", batch, detail=f"until {until}"),))
            case DropTail():
                raise AssertionError("the tail is no batch by number")

    def _pass(self, batch: Batch, action: str, *, copies: int = 1, detail: str = "") -> Done:
        """On its way out; while the tail is dropped, in place of the one before."""
        out = (batch,) * copies
        done = Done(out, (_note(action, batch, copies=copies, detail=detail),))
        if not self._drops_tail:
            return done
        before = self._newest.pop(batch.topic, Done())
        self._newest[batch.topic] = done
        return before + Done((), (_note("withhold_tail", batch),))

    def _release(self) -> Done:
        waiting = [batch for _, batch in self._held] + [entry[2] for entry in sorted(self._delayed)]
        self._held.clear()
        self._delayed.clear()
        done = Done()
        if not self._drops_tail:
            for newest in self._newest.values():
                done += newest
            self._newest.clear()
        for batch in sorted(waiting, key=lambda batch: batch.seq):
            done += self._pass(batch, "release")
        return done


def _names(fault: EventFault, seq: int) -> bool:
    match fault:
        case Reorder():
            return seq == fault.seq
        case DropTail():
            return False
        case _:
            return seq in fault.seqs


def _note(action: str, batch: Batch, *, copies: int = 0, detail: str = "") -> Action:
    return Action(action, batch.topic.decode("utf-8", "replace"), batch.seq, copies, detail)
