"""Order in one worker's event stream: apply, ignore, or wait for what is missing.

Events are fire-and-forget with a sequence number per message. A higher number than expected shows a gap; the missing
messages are asked for and what arrives meanwhile is held. There are two to ask: the worker itself replays its last
messages, and an agent beside it, where there is one, answers with all that the worker holds. When one of them fills
the gap, the index equals the truth again. When neither can, what we believed is wrong in an unknown way: the holder
is emptied and marked incomplete until a full clear, a complete replay or a snapshot makes it whole again.

The loss of the last message cannot be seen in the numbers (no higher one comes). An agent's heartbeat shows it, for it
names the newest number; without one, claims against actual hits do (`drift.py`), and then `doubt` asks for the tail.

A stream begins with the whole past, since a router may start after its workers: the agent is asked first then, because
its answer is as long as what the worker holds, while a replay is as long as what the worker did.
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


class AskSnapshot(Struct, frozen=True):
    """Ask the worker's agent for all that the worker holds."""


class Empty(Struct, frozen=True):
    """Forget what the holder was believed to have: an unknown part of its history is lost."""

    lost_from_seq: int


class Restart(Struct, frozen=True):
    """Forget what the holder was believed to have: all that it had after `last_seq` follows."""

    last_seq: int


class Ignored(Struct, frozen=True):
    """The batch was applied before; applying it again would count copies that do not exist."""

    seq: int


Verdict = Apply | AskReplay | AskSnapshot | Empty | Restart | Ignored


class Phase(Enum):
    STREAMING = auto()
    REPLAYING = auto()
    SNAPSHOTTING = auto()


class Sequence:
    """Sequence tracking for one worker rank of one incarnation."""

    def __init__(self, *, max_pending_batches: int, has_agent: bool = False) -> None:
        self._max_pending = max_pending_batches
        self._has_agent = has_agent
        self._left_to_ask: list[Phase] = []  # in this round, next one first
        self._pending: dict[int, KvBatch] = {}
        self._must_reach = 0  # batches below this number exist, whether they came or not
        self._whole = False
        self._doubted = False  # outcomes contradict what was believed
        self.phase = Phase.STREAMING
        self.next_seq = 0

    @property
    def state(self) -> IndexState:
        return IndexState.LIVE if self._whole and not self._doubted else IndexState.INCOMPLETE

    @property
    def whole(self) -> bool:
        """Nothing is missing as far as the numbers tell."""
        return self._whole

    @property
    def waiting(self) -> bool:
        """Is an answer of the worker or its agent awaited?"""
        return self.phase is not Phase.STREAMING

    def begin(self) -> tuple[Verdict, ...]:
        """A new incarnation, or an operator's resync: rebuild from the first message on."""
        self._whole = self._doubted = False
        self.next_seq = self._must_reach = 0
        return self._ask([Phase.SNAPSHOTTING, Phase.REPLAYING] if self._has_agent else [Phase.REPLAYING])

    def offer(self, batch: KvBatch) -> tuple[Verdict, ...]:
        """A batch arrived on the live stream."""
        if batch.seq < self.next_seq:
            return (Ignored(batch.seq),)
        if self.waiting:
            return self._hold(batch)
        if batch.seq == self.next_seq:
            return (self._take(batch),)
        self._pending[batch.seq] = batch
        return self._fill_gap()

    def behind(self, last_seq: int) -> tuple[Verdict, ...]:
        """The agent has seen batches up to this number, and they did not come here in good time."""
        if self.waiting or last_seq < self.next_seq:
            return ()
        self._must_reach = last_seq + 1
        return self._fill_gap()

    def restore(self) -> tuple[Verdict, ...]:
        """What we believe is known to be wrong or incomplete, with no number missing: only a snapshot mends that."""
        return () if self.waiting else self._ask([Phase.SNAPSHOTTING])

    def doubt(self) -> tuple[Verdict, ...]:
        """Outcomes contradict what was believed: the last messages may be lost, so ask for what follows."""
        self._doubted = True
        return () if self.waiting else self._ask([Phase.REPLAYING])

    def check_tail(self) -> tuple[Verdict, ...]:
        """Nothing speaks for a loss, but asking whether anything follows is cheap for who is close to the worker."""
        return () if self.waiting else self._ask([Phase.REPLAYING])

    def trust(self) -> None:
        """Outcomes agree with what is believed."""
        self._doubted = False

    def replayed(self, batches: tuple[KvBatch, ...]) -> tuple[Verdict, ...]:
        """The replay ended; `batches` is what the worker still had."""
        if self.phase is not Phase.REPLAYING:
            return ()
        if not batches and not self._pending and not self._must_reach and self.next_seq == 0:
            self._whole = True  # it has not published yet: empty is the truth
        for batch in batches:
            if batch.seq >= self.next_seq:
                self._pending.setdefault(batch.seq, batch)
        return self._resume_or_ask_on()

    def snapshot(self, last_seq: int, batches: tuple[KvBatch, ...], *, whole: bool) -> tuple[Verdict, ...]:
        """The agent answered. A state older than what was applied already is no answer."""
        if self.phase is not Phase.SNAPSHOTTING or last_seq + 1 < self.next_seq:
            return self.unavailable(Phase.SNAPSHOTTING)
        self._whole = whole
        self._doubted = False
        self.next_seq = last_seq + 1
        for seq in [seq for seq in self._pending if seq < self.next_seq]:
            del self._pending[seq]
        return (Restart(last_seq), *map(Apply, batches), *self._resume_or_ask_on())

    def unavailable(self, asked: Phase) -> tuple[Verdict, ...]:
        """The one that was asked cannot answer, or did not in time."""
        return self._resume_or_ask_on() if self.phase is asked else ()

    def _fill_gap(self) -> tuple[Verdict, ...]:
        return self._ask([Phase.REPLAYING, Phase.SNAPSHOTTING] if self._has_agent else [Phase.REPLAYING])

    def _ask(self, in_this_order: list[Phase]) -> tuple[Verdict, ...]:
        self.phase, *self._left_to_ask = in_this_order
        return (AskReplay(self.next_seq) if self.phase is Phase.REPLAYING else AskSnapshot(),)

    def _resume_or_ask_on(self) -> tuple[Verdict, ...]:
        """A round asks each source once, so that a gap which nobody can fill costs no more than that."""
        if self._left_to_ask and (self._gap_left() or not self._whole):
            return self._ask(self._left_to_ask)
        return self._resume()

    def _gap_left(self) -> bool:
        last = max(self._pending, default=self._must_reach - 1)
        wanted = max(last + 1, self._must_reach) - self.next_seq
        return len(self._pending) < wanted

    def _hold(self, batch: KvBatch) -> tuple[Verdict, ...]:
        self._pending[batch.seq] = batch
        if len(self._pending) <= self._max_pending:
            return ()
        return self._resume()  # the bound: what is missing by now is given up

    def _resume(self) -> tuple[Verdict, ...]:
        """Apply what is at hand in order; a number that is still missing is lost for good."""
        self.phase = Phase.STREAMING
        verdicts: list[Verdict] = []
        for seq in sorted(self._pending):
            if seq > self.next_seq:
                verdicts.append(self._lose_until(seq))
            verdicts.append(self._take(self._pending[seq]))
        if self._must_reach > self.next_seq:
            verdicts.append(self._lose_until(self._must_reach))
        self._pending.clear()
        return tuple(verdicts)

    def _lose_until(self, seq: int) -> Empty:
        lost = Empty(self.next_seq)
        self._whole = False
        self.next_seq = seq
        return lost

    def _take(self, batch: KvBatch) -> Apply:
        assert batch.seq == self.next_seq, f"took {batch.seq}, expected {self.next_seq}"
        starts_empty = any(isinstance(event, BlocksCleared) and event.tier is None for event in batch.events)
        if batch.seq == 0 or starts_empty:
            self._whole = True
            self._doubted = False
        self.next_seq = batch.seq + 1
        return Apply(batch)
