"""Keeps the residency index true to the workers' event streams.

Sequence tracking decides what may count, the index does the counting; this is where the two meet, once, for the live
gateway, the simulator and the drills.
"""

from __future__ import annotations

from collections import deque
from functools import partial

from kvrelay.core.contract.keys import MAX_BLOCK_TOKENS, Keyer
from kvrelay.core.index.agent_word import AgentWord
from kvrelay.core.index.approximate import Approximate
from kvrelay.core.index.drift import CheckTail, Drift, Outcome, Rebuild
from kvrelay.core.index.in_flight import InFlight
from kvrelay.core.index.residency import Applied, Residency
from kvrelay.core.index.sequence import (
    Apply,
    AskReplay,
    AskSnapshot,
    Empty,
    Ignored,
    Phase,
    Restart,
    Sequence,
    Verdict,
)
from kvrelay.core.index.whole_prompts import WholePrompts
from kvrelay.core.model.effects import Effect, Report, RequestReplay, RequestSnapshot
from kvrelay.core.model.events import (
    AgentHeartbeat,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EventsSkipped,
    KvBatch,
    ReplayArrived,
    ReplayUnavailable,
    SnapshotArrived,
    SnapshotUnavailable,
    WorkerSpec,
)
from kvrelay.core.model.ids import TargetId, WorkerId
from kvrelay.core.model.prompt import BlockKeys
from kvrelay.core.model.units import IndexState, Tier
from kvrelay.core.routing.fleet import FleetView, Target, Worker
from kvrelay.core.routing.settings import RouterSettings

Answer = ReplayArrived | ReplayUnavailable | SnapshotArrived | SnapshotUnavailable
Change = Apply | Empty | Restart
"""Verdicts that change what a target is believed to have."""

SWEEP_BLOCKS = 500
USELESS_AFTER_EVENTS = 32  # that could not be indexed, with none that could
_EXPIRY_SLACK = 0.1  # of the time that a guess is kept
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
        self._give_up_at: dict[TargetId, float] = {}  # replays and snapshots under way
        self.guesses_due: float | None = None  # when some of what was guessed is to be forgotten
        self._backlog: dict[TargetId, deque[Change]] = {}  # in order, beyond what one step may apply

    # --- targets -------------------------------------------------------------------------------------------------

    def new_target(self, worker: WorkerId, rank: int, spec: WorkerSpec) -> Target:
        """An empty target for a worker that joins."""
        block_size = spec.block_size_tokens or 0
        too_large = block_size > MAX_BLOCK_TOKENS
        block_size = 0 if too_large else block_size
        target = Target(TargetId(worker, rank), self.residency.add_holder(max(block_size, 1)), block_size)
        if spec.sends_events:
            pending = self._settings.max_pending_batches
            target.sequence = Sequence(max_pending_batches=pending, has_agent=spec.has_agent)
            target.drift = Drift(self._settings.drift, partial(self._depth_now, target.slot))
            target.agent = self._new_agent_word() if spec.has_agent else None
        elif block_size:
            target.approximate = self._new_approximate(target, spec)
        if not spec.sends_events and not block_size:
            target.index_broken = "no events and no known block size"
        if too_large:
            target.index_broken = _too_large(spec.block_size_tokens or 0)
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
        self._give_up_at.pop(target.id, None)
        self._backlog.pop(target.id, None)

    def reset(self, now: float, target: Target, *, replay: bool) -> tuple[Effect, ...]:
        """Forget what the target is believed to have; with `replay`, ask for its history."""
        self._backlog.pop(target.id, None)
        target.catching_up = False
        self._empty(now, target)
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

    def answered(self, now: float, event: Answer) -> tuple[Effect, ...]:
        """A replay or a snapshot that was asked for, or the word that there is none."""
        target = self._fleet.target(event.worker, event.rank)
        if target is None or target.sequence is None:
            return self._late(event.worker)
        before = target.sequence.next_seq
        match event:
            case ReplayArrived():
                verdicts = target.sequence.replayed(event.batches)
            case SnapshotArrived():
                verdicts = target.sequence.snapshot(event.last_seq, event.batches, whole=event.whole)
            case ReplayUnavailable():
                verdicts = target.sequence.unavailable(Phase.REPLAYING)
            case SnapshotUnavailable():
                verdicts = target.sequence.unavailable(Phase.SNAPSHOTTING)
        _say_tail_checked(target, before)
        return self._follow(now, target, verdicts)

    def heartbeat(self, now: float, event: AgentHeartbeat) -> tuple[Effect, ...]:
        """The agent knows newer events than we have, or counts other blocks: what is missing here is asked for."""
        target = self._fleet.target(event.worker, event.rank)
        if target is None:
            return self._late(event.worker)
        if target.sequence is None or target.agent is None:
            return ()  # its events are switched off here, so there is nothing to be compared
        sequence, name = target.sequence, target.id.worker.name
        if target.agent.names_lost_tail(now, event, sequence):
            lost = Report("event_tail_lost", name, f"rank {event.rank}: {sequence.next_seq} to {event.last_seq}")
            return (lost, *self._follow(now, target, sequence.behind(event.last_seq)))
        if target.catching_up or not target.agent.may_compare(now, event, sequence):
            return ()
        own = self.residency.census(target.slot)
        if not target.agent.differs(now, own, event, sequence):
            return ()
        drift: tuple[Effect, ...] = ()
        if sequence.state is IndexState.LIVE:  # else it was known that something is missing
            detail = f"rank {event.rank}: {own.blocks} blocks, agent {event.census.blocks}"
            drift = (Report("index_drift", name, detail),)
        return drift + self._follow(now, target, sequence.restore())

    def give_up_on_answers(self, now: float) -> tuple[Effect, ...]:
        """Replays and snapshots that did not come in time are over."""
        effects: tuple[Effect, ...] = ()
        overdue = [target_id for target_id, at in self._give_up_at.items() if at <= now]
        for target_id in overdue:
            target = self._fleet.target(target_id.worker, target_id.rank)
            assert target is not None and target.sequence is not None, f"{target_id} left a question behind"
            verdicts = target.sequence.unavailable(target.sequence.phase)
            _say_tail_checked(target, target.sequence.next_seq)
            effects += self._follow(now, target, verdicts)
        return effects

    def next_deadline(self) -> float | None:
        """When the oldest question to a worker or an agent is given up."""
        return min(self._give_up_at.values(), default=None)

    def has_backlog(self) -> bool:
        """Is there anything for `catch_up` to do?"""
        return bool(self._backlog)

    def catch_up(self, now: float) -> tuple[Effect, ...]:
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
            effects += self._count_in(now, target, verdict)
        del self._backlog[target_id]
        target.catching_up = bool(waiting)
        if waiting:
            self._backlog[target_id] = waiting  # at the end: everybody gets a turn
        return tuple(effects)

    def heard(self, worker: Worker, problem: str | None) -> tuple[Effect, ...]:
        """Events of a worker that should publish them do not reach us (`problem`), or do again."""
        followed = [target for target in worker.targets if target.sequence is not None]
        if all(target.index_broken == problem for target in followed):
            return ()
        for target in followed:
            target.index_broken = problem
        if problem is None:
            return (Report("index_usable", worker.id.name),)
        return (Report("index_unusable", worker.id.name, problem), *self.all_unusable())

    def all_unusable(self) -> tuple[Effect, ...]:
        """Said once more for the whole fleet, when the last usable index is gone."""
        targets = [target for target in self._fleet.targets if target is not None]
        if any(target.index_state is not IndexState.UNUSABLE for target in targets):
            return ()
        return (Report("index_unusable", None, "of no worker anything can match; prompts are not looked at"),)

    # --- outcomes ------------------------------------------------------------------------------------------------

    def compare(self, now: float, target: Target, outcome: Outcome) -> tuple[Effect, ...]:
        """Hold what was claimed for a request against what the engine hit; answers the remedy when they drift apart."""
        sequence, drift = target.sequence, target.drift
        if sequence is None or drift is None or sequence.waiting or target.catching_up:
            return ()  # what is known to be unfinished says nothing
        if not sequence.whole and outcome.actual_blocks > outcome.expected_blocks:
            return ()  # incomplete, and said so: hits are missed
        remedy = drift.finished(now, outcome, target.block_size_tokens)
        if remedy is not None:
            return self._remedy(now, target, remedy)
        if drift.calm:
            sequence.trust()
        return ()

    def _remedy(self, now: float, target: Target, remedy: CheckTail | Rebuild) -> tuple[Effect, ...]:
        assert target.sequence is not None
        what = "tail asked for" if isinstance(remedy, CheckTail) else "residency dropped and history asked for"
        seen = f"rank {target.id.rank}: {remedy.kind.value} of {remedy.tokens} tokens in {remedy.requests} requests"
        report = Report("tail_drift", target.id.worker.name, f"{seen}; {what}")
        if isinstance(remedy, Rebuild):
            if target.agent is not None:  # its snapshot takes the place of what is believed, once it is there
                return (report, *self._follow(now, target, target.sequence.restore()))
            return (report, *self.reset(now, target, replay=True))
        return (report, *self._follow(now, target, target.sequence.doubt(), is_gap=False))

    def served(self, now: float, target: Target, keys: BlockKeys, *, actual_blocks: int | None) -> None:
        """A worker without events: what went through it is what we believe it has, corrected by what it hit."""
        assert target.approximate is not None
        if actual_blocks is not None:
            target.approximate.corrected(keys, actual_blocks=actual_blocks)
        target.approximate.served(now, keys)
        if self.guesses_due is None:
            self.guesses_due = now + (1 + _EXPIRY_SLACK) * self._settings.approximate_ttl_s

    def expire_guesses(self, now: float) -> None:
        """Forget guesses that are too old, one step's worth. They may be a little older: few wake-ups do it all."""
        if self.guesses_due is None or now < self.guesses_due:
            return
        budget_blocks = APPLY_BLOCKS
        expiries: list[float] = []
        for target in self._fleet.targets:
            if target is not None and target.approximate is not None:
                budget_blocks -= target.approximate.expire(now, budget_blocks)
                expiry = target.approximate.next_expiry()
                expiries += () if expiry is None else (expiry,)
        if not expiries:
            self.guesses_due = None
        elif min(expiries) <= now:
            self.guesses_due = now  # beyond what one step may do
        else:
            self.guesses_due = min(expiries) + _EXPIRY_SLACK * self._settings.approximate_ttl_s

    def _depth_now(self, slot: int, keys: BlockKeys) -> int:
        return int(self.residency.depths(keys)[slot])

    def _follow(
        self, now: float, target: Target, verdicts: tuple[Verdict, ...], *, is_gap: bool = True
    ) -> tuple[Effect, ...]:
        effects: list[Effect] = []
        name = target.id.worker.name
        budget_blocks = APPLY_BLOCKS
        for verdict in verdicts:
            match verdict:
                case Apply() | Empty() | Restart():
                    if budget_blocks > 0 and target.id not in self._backlog:
                        budget_blocks -= _blocks_in(verdict)
                        effects += self._count_in(now, target, verdict)
                    else:
                        self._backlog.setdefault(target.id, deque()).append(verdict)
                        target.catching_up = True
                case AskReplay(from_seq):
                    if from_seq and is_gap:
                        self.counts[name].gaps += 1
                        effects.append(Report("event_gap", name, f"rank {target.id.rank}: replay from {from_seq}"))
                    effects.append(RequestReplay(target.id.worker, target.id.rank, from_seq))
                    self._give_up_at[target.id] = now + self._settings.replay_timeout_s
                case AskSnapshot():
                    effects.append(RequestSnapshot(target.id.worker, target.id.rank))
                    self._give_up_at[target.id] = now + self._settings.snapshot_timeout_s
                case Ignored():
                    self.counts[name].duplicates += 1
                    effects.append(Report("event_duplicate", name))
        if target.sequence is not None and not target.sequence.waiting:
            self._give_up_at.pop(target.id, None)
        return tuple(effects)

    def _count_in(self, now: float, target: Target, verdict: Change) -> list[Effect]:
        name, rank = target.id.worker.name, target.id.rank
        match verdict:
            case Apply():
                return self._apply(now, target, verdict.batch, self.counts[name])
            case Restart():
                _say_emptied(now, target)
                self.residency.empty_holder(target.slot)
                return [Report("snapshot_restored", name, f"rank {rank}: as after {verdict.last_seq}")]
            case Empty():
                self._empty(now, target)
                return [Report("event_gap_lost", name, f"rank {rank}: from {verdict.lost_from_seq}")]

    def _apply(self, now: float, target: Target, batch: KvBatch, counts: EventCounts) -> list[Effect]:
        effects: list[Effect] = []
        for event in batch.events:
            if isinstance(event, BlocksStored) and event.block_size_tokens > MAX_BLOCK_TOKENS:
                event = EventsSkipped(_too_large(event.block_size_tokens))
            if isinstance(event, EventsSkipped):
                counts.skipped += event.count
                effects.append(Report("events_skipped", target.id.worker.name, event.kind, event.count))
                effects += self._note_skipped(target, event)
                continue
            if target.skipped_alone is not None and isinstance(event, BlocksStored):
                effects += self._note_indexed(target)
            if isinstance(event, BlocksStored) and event.block_size_tokens != target.block_size_tokens:
                effects += self._learn_block_size(now, target, event.block_size_tokens)
            elif isinstance(event, BlocksRemoved) and event.tier is Tier.GPU and target.drift is not None:
                target.drift.removed(now, self.residency.keys_of(target.slot, event.hashes))
            elif isinstance(event, BlocksCleared) and event.tier in (None, Tier.GPU):
                self.in_flight.discard_slot(target.slot)
                _say_emptied(now, target)
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

    def _note_skipped(self, target: Target, event: EventsSkipped) -> tuple[Effect, ...]:
        """Events that come and of which nothing can be indexed are no better than none."""
        if target.skipped_alone is None:
            return ()
        before = target.skipped_alone
        target.skipped_alone += event.count
        if not before < USELESS_AFTER_EVENTS <= target.skipped_alone or target.index_broken is not None:
            return ()
        target.index_broken = f"none of its {target.skipped_alone} events could be indexed: {event.kind}"
        return (Report("index_unusable", target.id.worker.name, target.index_broken), *self.all_unusable())

    def _note_indexed(self, target: Target) -> tuple[Effect, ...]:
        was_useless = (target.skipped_alone or 0) >= USELESS_AFTER_EVENTS and target.index_broken is not None
        target.skipped_alone = None
        if not was_useless:
            return ()
        target.index_broken = None
        return (Report("index_usable", target.id.worker.name),)

    def _learn_block_size(self, now: float, target: Target, block_size_tokens: int) -> list[Effect]:
        """The events are the truth about the size of the blocks they describe."""
        said, name = target.block_size_tokens, target.id.worker.name
        self.residency.resize_holder(target.slot, block_size_tokens)
        self._fleet.resized(target, block_size_tokens)
        self.in_flight.discard_slot(target.slot)  # under keys of the other size
        _say_emptied(now, target)
        if not said:
            return []
        detail = f"registered with {said} tokens, events carry {block_size_tokens}; using {block_size_tokens}"
        return [Report("block_size_mismatch", name, detail)]

    def _empty(self, now: float, target: Target) -> None:
        _say_emptied(now, target)
        self.residency.empty_holder(target.slot)
        self.in_flight.discard_slot(target.slot)
        if target.approximate is not None:
            target.approximate = target.approximate.emptied()

    def _new_agent_word(self) -> AgentWord:
        return AgentWord(grace_s=self._settings.heartbeat_grace_s, interval_s=self._settings.census_interval_s)

    def _new_approximate(self, target: Target, spec: WorkerSpec) -> Approximate:
        kind = WholePrompts if spec.keeps_whole_prompts else Approximate
        return kind(
            self.residency,
            target.slot,
            max_blocks=self._settings.max_approximate_blocks,
            ttl_s=self._settings.approximate_ttl_s,
        )

    def _late(self, worker: WorkerId) -> tuple[Effect, ...]:
        counts = self.counts.get(worker.name)
        if counts is not None:
            counts.late += 1
        return (Report("event_late", worker.name, f"of {worker.incarnation}"),)


def _say_emptied(now: float, target: Target) -> None:
    if target.drift is not None:
        target.drift.emptied(now)


def _say_tail_checked(target: Target, next_seq_before: int) -> None:
    """An answer, or the lack of one, ends the question for the tail."""
    assert target.sequence is not None
    if target.drift is not None:
        target.drift.tail_checked(brought_news=target.sequence.next_seq > next_seq_before)


def _too_large(block_size_tokens: int) -> str:
    return f"block size {block_size_tokens} is above {MAX_BLOCK_TOKENS} tokens"


def _blocks_in(verdict: Change) -> int:
    """Work of a verdict in blocks; an empty batch still costs something."""
    if not isinstance(verdict, Apply):
        return 1
    return 1 + sum(len(e.hashes) for e in verdict.batch.events if isinstance(e, BlocksStored | BlocksRemoved))
