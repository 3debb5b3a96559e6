"""Order in one worker's event stream: apply, ignore, or wait for a replay.

Events are fire-and-forget with a sequence number per message. A higher number than expected shows a gap; the missing
messages are asked for and what arrives meanwhile is held. When the replay fills the gap, everything is applied in
order. When it cannot, what we believed is wrong in an unknown way: the holder is emptied and marked incomplete until
a full clear or a complete replay makes it whole again. The loss of the last message cannot be seen here at all (no
higher number comes); claims against actual hits show it.

A stream begins with a replay from 0, since a router may start after its workers.
"""

from __future__ import annotations

from enum import Enum, auto

from msgspec import Struct

from kvrelay.core.model.events import BlocksCleared, KvBatch
from kvrelay.core.model.units import IndexState


class Apply(Struct, frozen=True, eq=False):
    """Let this batch count now."""

    batch: KvBatch


class AskReplay(Struct, frozen=True):
    """Ask the worker for its batches from `from_seq` on."""

    from_seq: int


class Empty(Struct, frozen=True):
    """Forget what the holder was believed to have: an unknown part of its history is lost."""

    lost_from_seq: int


class Ignored(Struct, frozen=True):
    """The batch was applied before; applying it again would count copies that do not exist."""

    seq: int


Verdict = Apply | AskReplay | Empty | Ignored


class _Phase(Enum):
    STREAMING = auto()
    REPLAYING = auto()


class Sequence:
    """Sequence tracking for one worker rank of one incarnation."""

    def __init__(self, *, max_pending_batches: int) -> None:
        self._max_pending = max_pending_batches
        self._phase = _Phase.STREAMING
        self._pending: dict[int, KvBatch] = {}
        self._whole = False
        self.next_seq = 0

    @property
    def state(self) -> IndexState:
        return IndexState.LIVE if self._whole else IndexState.INCOMPLETE

    @property
    def replaying(self) -> bool:
        return self._phase is _Phase.REPLAYING

    def begin(self) -> tuple[Verdict, ...]:
        """A new incarnation, or an operator's resync: rebuild from the first message on."""
        self._whole = False
        self.next_seq = 0
        return self._ask()

    def offer(self, batch: KvBatch) -> tuple[Verdict, ...]:
        """A batch arrived on the live stream."""
        if batch.seq < self.next_seq:
            return (Ignored(batch.seq),)
        if self._phase is _Phase.REPLAYING:
            return self._hold(batch)
        if batch.seq == self.next_seq:
            return (self._take(batch),)
        self._pending[batch.seq] = batch
        return self._ask()

    def replayed(self, batches: tuple[KvBatch, ...]) -> tuple[Verdict, ...]:
        """The replay ended; `batches` is what the worker still had."""
        if self._phase is not _Phase.REPLAYING:
            return ()
        if not batches and not self._pending and self.next_seq == 0:
            self._whole = True  # it has not published yet: empty is the truth
        for batch in batches:
            if batch.seq >= self.next_seq:
                self._pending.setdefault(batch.seq, batch)
        return self._resume()

    def unavailable(self) -> tuple[Verdict, ...]:
        """There is no replay, or it did not answer in time."""
        return self._resume() if self._phase is _Phase.REPLAYING else ()

    def _ask(self) -> tuple[Verdict, ...]:
        self._phase = _Phase.REPLAYING
        return (AskReplay(self.next_seq),)

    def _hold(self, batch: KvBatch) -> tuple[Verdict, ...]:
        self._pending[batch.seq] = batch
        if len(self._pending) <= self._max_pending:
            return ()
        return self._resume()  # the bound: what is missing by now is given up

    def _resume(self) -> tuple[Verdict, ...]:
        """Apply what is at hand in order; a number that is still missing is lost for good."""
        self._phase = _Phase.STREAMING
        verdicts: list[Verdict] = []
        for seq in sorted(self._pending):
            if seq > self.next_seq:
                verdicts.append(Empty(self.next_seq))
                self._whole = False
                self.next_seq = seq
            verdicts.append(self._take(self._pending[seq]))
        self._pending.clear()
        return tuple(verdicts)

    def _take(self, batch: KvBatch) -> Apply:
        assert batch.seq == self.next_seq, f"took {batch.seq}, expected {self.next_seq}"
        starts_empty = any(isinstance(event, BlocksCleared) and event.tier is None for event in batch.events)
        if batch.seq == 0 or starts_empty:
            self._whole = True
        self.next_seq = batch.seq + 1
        return Apply(batch)
