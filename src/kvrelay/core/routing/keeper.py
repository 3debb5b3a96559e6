"""Keeps the residency index true to the workers' event streams.

Sequence tracking decides what may count, the index does the counting; this is where the two meet, once, for the live
gateway, the simulator and the drills.
"""

from __future__ import annotations

from collections import deque

from kvrelay.core.contract.keys import Keyer
from kvrelay.core.index.approximate import Approximate
from kvrelay.core.index.in_flight import InFlight
from kvrelay.core.index.residency import Applied, Residency
from kvrelay.core.index.sequence import Apply, AskReplay, Empty, Ignored, Sequence, Verdict
from kvrelay.core.model.effects import Effect, Report, RequestReplay
from kvrelay.core.model.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EventsSkipped,
    KvBatch,
    ReplayArrived,
    ReplayUnavailable,
    WorkerSpec,
)
from kvrelay.core.model.ids import TargetId, WorkerId
from kvrelay.core.routing.fleet import FleetView, Target
from kvrelay.core.routing.settings import RouterSettings

SWEEP_BLOCKS = 500
APPLY_BLOCKS = 1_000  # at most in one step: a replay of a whole history must not hold up anybody's tokens


class EventCounts:
    """Running totals per worker name, for status and metrics."""

    __slots__ = ("duplicates", "gaps", "late", "orphans_dropped", "removed", "skipped", "stored", "unknown")

    def __init__(self) -> None:
        self.stored = self.removed = self.unknown = self.skipped = 0
        self.duplicates = self.gaps = self.late = self.orphans_dropped = 0


class Keeper:
    """Residency, in-flight prompts and event sequences of all live targets."""

    def __init__(self, settings: RouterSettings, fleet: FleetView) -> None:
        self._settings = settings
        self._fleet = fleet
        self.keyer = Keyer(settings.key_seed)
        self.residency = Residency(self.keyer, max_orphan_blocks=settings.max_orphan_blocks)
        self.in_flight = InFlight()
        self.counts: dict[str, EventCounts] = {}
        self._asked_at: dict[TargetId, float] = {}  # replays under way
        self._backlog: dict[TargetId, deque[Apply | Empty]] = {}  # in order, beyond what one step may apply

    # --- targets -------------------------------------------------------------------------------------------------

    def new_target(self, worker: WorkerId, rank: int, spec: WorkerSpec) -> Target:
        """An empty target for a worker that joins."""
        block_size = spec.block_size_tokens or 0
        target = Target(TargetId(worker, rank), self.residency.add_holder(max(block_size, 1)), block_size)
        if spec.sends_events:
            target.sequence = Sequence(max_pending_batches=self._settings.max_pending_batches)
        elif block_size:
            target.approximate = self._new_approximate(target)
        if not spec.sends_events and not block_size:
            target.index_broken = "no events and no known block size"
        self.counts.setdefault(worker.name, EventCounts())
        return target

    def begin(self, now: float, target: Target) -> tuple[Effect, ...]:
        """Rebuild a target's residency from the start of its stream."""
        if target.sequence is None:
            return ()
        return self._follow(now, target, target.sequence.begin())

    def drop(self, target: Target) -> None:
        """The target is gone."""
        self.residency.drop_holder(target.slot)
        self.in_flight.discard_slot(target.slot)
        self._asked_at.pop(target.id, None)
        self._backlog.pop(target.id, None)

    def reset(self, now: float, target: Target, *, replay: bool) -> tuple[Effect, ...]:
        """Forget what the target is believed to have; with `replay`, ask for its history."""
        self._backlog.pop(target.id, None)
        target.catching_up = False
        self._empty(target)
        return self.begin(now, target) if replay else ()

    def forget_worker(self, name: str) -> None:
        self.counts.pop(name, None)

    # --- events --------------------------------------------------------------------------------------------------

    def batch(self, now: float, event: KvBatch) -> tuple[Effect, ...]:
        """One message of a live stream. Messages of a former incarnation are counted and change nothing."""
        target = self._fleet.target(event.worker, event.rank)
        if target is None or target.sequence is None:
            return self._late(event.worker)
        return self._follow(now, target, target.sequence.offer(event))

    def replayed(self, now: float, event: ReplayArrived | ReplayUnavailable) -> tuple[Effect, ...]:
        """A replay ended, with or without batches."""
        target = self._fleet.target(event.worker, event.rank)
        if target is None or target.sequence is None:
            return self._late(event.worker)
        if isinstance(event, ReplayArrived):
            return self._follow(now, target, target.sequence.replayed(event.batches))
        return self._follow(now, target, target.sequence.unavailable())

    def give_up_on_replays(self, now: float) -> tuple[Effect, ...]:
        """Replays that did not answer in time are over."""
        effects: tuple[Effect, ...] = ()
        overdue = [t for t, at in self._asked_at.items() if now - at >= self._settings.replay_timeout_s]
        for target_id in overdue:
            effects += self.replayed(now, ReplayUnavailable(target_id.worker, target_id.rank, "no answer in time"))
        return effects

    def next_deadline(self) -> float | None:
        """When the oldest running replay is given up."""
        if not self._asked_at:
            return None
        return min(self._asked_at.values()) + self._settings.replay_timeout_s

    def has_backlog(self) -> bool:
        """Is there anything for `catch_up` to do?"""
        return bool(self._backlog)

    def catch_up(self) -> tuple[Effect, ...]:
        """Apply one step's worth of what could not be applied at once."""
        if not self._backlog:
            return ()
        target_id, waiting = next(iter(self._backlog.items()))
        target = self._fleet.target(target_id.worker, target_id.rank)
        assert target is not None, f"{target_id} left its backlog behind"
        effects: list[Effect] = []
        budget_blocks = APPLY_BLOCKS
        while waiting and budget_blocks > 0:
            verdict = waiting.popleft()
            budget_blocks -= _blocks_in(verdict)
            effects += self._count_in(target, verdict)
        del self._backlog[target_id]
        target.catching_up = bool(waiting)
        if waiting:
            self._backlog[target_id] = waiting  # at the end: everybody gets a turn
        return tuple(effects)

    def _follow(self, now: float, target: Target, verdicts: tuple[Verdict, ...]) -> tuple[Effect, ...]:
        effects: list[Effect] = []
        name = target.id.worker.name
        budget_blocks = APPLY_BLOCKS
        for verdict in verdicts:
            match verdict:
                case Apply() | Empty():
                    if budget_blocks > 0 and target.id not in self._backlog:
                        budget_blocks -= _blocks_in(verdict)
                        effects += self._count_in(target, verdict)
                    else:
                        self._backlog.setdefault(target.id, deque()).append(verdict)
                        target.catching_up = True
                case AskReplay(from_seq):
                    if from_seq:
                        self.counts[name].gaps += 1
                        effects.append(Report("event_gap", name, f"rank {target.id.rank}: replay from {from_seq}"))
                    effects.append(RequestReplay(target.id.worker, target.id.rank, from_seq))
                    self._asked_at[target.id] = now
                case Ignored():
                    self.counts[name].duplicates += 1
                    effects.append(Report("event_duplicate", name))
        if target.sequence is not None and not target.sequence.replaying:
            self._asked_at.pop(target.id, None)
        return tuple(effects)

    def _count_in(self, target: Target, verdict: Apply | Empty) -> list[Effect]:
        if isinstance(verdict, Apply):
            return self._apply(target, verdict.batch, self.counts[target.id.worker.name])
        self._empty(target)
        return [Report("event_gap_lost", target.id.worker.name, f"rank {target.id.rank}: from {verdict.lost_from_seq}")]

    def _apply(self, target: Target, batch: KvBatch, counts: EventCounts) -> list[Effect]:
        effects: list[Effect] = []
        for event in batch.events:
            if isinstance(event, EventsSkipped):
                counts.skipped += event.count
                effects.append(Report("events_skipped", target.id.worker.name, event.kind, event.count))
                continue
            if isinstance(event, BlocksStored) and event.block_size_tokens != target.block_size_tokens:
                effects += self._learn_block_size(target, event.block_size_tokens)
            elif isinstance(event, BlocksCleared) and event.tier is None:
                self.in_flight.discard_slot(target.slot)
            effects += self._count(target, counts, self.residency.apply(target.slot, event))
        return effects

    def _count(self, target: Target, counts: EventCounts, applied: Applied) -> list[Effect]:
        counts.stored += applied.stored + applied.orphaned
        counts.removed += applied.removed
        counts.unknown += applied.unknown
        if not applied.dropped:
            return []
        counts.orphans_dropped += applied.dropped
        return [Report("orphans_dropped", target.id.worker.name, count=applied.dropped)]

    def _learn_block_size(self, target: Target, block_size_tokens: int) -> list[Effect]:
        """The events are the truth about the size of the blocks they describe."""
        said, name = target.block_size_tokens, target.id.worker.name
        self.residency.resize_holder(target.slot, block_size_tokens)
        self._fleet.resized(target, block_size_tokens)
        if not said:
            return []
        detail = f"registered with {said} tokens, events carry {block_size_tokens}; using {block_size_tokens}"
        return [Report("block_size_mismatch", name, detail)]

    def _empty(self, target: Target) -> None:
        self.residency.empty_holder(target.slot)
        self.in_flight.discard_slot(target.slot)
        if target.approximate is not None:
            target.approximate = self._new_approximate(target)

    def _new_approximate(self, target: Target) -> Approximate:
        return Approximate(self.residency, target.slot, max_blocks=self._settings.max_approximate_blocks)

    def _late(self, worker: WorkerId) -> tuple[Effect, ...]:
        counts = self.counts.get(worker.name)
        if counts is not None:
            counts.late += 1
        return (Report("event_late", worker.name, f"of {worker.incarnation}"),)


def _blocks_in(verdict: Apply | Empty) -> int:
    """Work of a verdict in blocks; an empty batch still costs something."""
    if isinstance(verdict, Empty):
        return 1
    return 1 + sum(len(e.hashes) for e in verdict.batch.events if isinstance(e, BlocksStored | BlocksRemoved))
