"""The tiers as one machine, `step(now_s, event) -> effects`: what to ask of which store, and what may be believed.

    read    look up -> fetch -> decrypt and verify -> ready, within a deadline
    write   write -> verify -> commit (manifest) -> announce

The same machine runs in every process that uses the shared store: the engine connector, the mock workers, the commands.
It never touches a byte; the host (`edge/stores/host.py`) runs its effects and says what became of them. All times are
of one monotonic clock; chance comes from the seed.
"""

from __future__ import annotations

from kvrelay.core.tiers.effects import (
    Check,
    Fetch,
    Ping,
    Probe,
    Remove,
    TierEffect,
    TierStateChanged,
    Transfer,
    WakeAt,
    Write,
)
from kvrelay.core.tiers.events import (
    Checked,
    Fetched,
    FetchSeen,
    LoadAsked,
    LookupAsked,
    ObjectsFound,
    Pinged,
    PrefillSeen,
    Probed,
    RemovalAsked,
    Removed,
    SaveAsked,
    TierEvent,
    Transferred,
    WarmAsked,
    Woke,
    Written,
)
from kvrelay.core.tiers.loads import Loads
from kvrelay.core.tiers.lookups import Lookups
from kvrelay.core.tiers.outcome import FAILURES, Outcome
from kvrelay.core.tiers.removals import Removals
from kvrelay.core.tiers.saves import Saves
from kvrelay.core.tiers.settings import TiersSettings
from kvrelay.core.tiers.tier import Shared, TierState

PING_DEADLINE_S = 2.0
_JOBS = (Probe, Fetch, Write, Check, Remove, Transfer, Ping)


class TierMachine:
    def __init__(self, settings: TiersSettings, *, seed: int) -> None:
        self.shared = Shared(settings, seed=seed)
        self._lookups = Lookups(self.shared)
        self._loads = Loads(self.shared)
        self._saves = Saves(self.shared)
        self._removals = Removals(self.shared)
        self._running: dict[int, TierEffect] = {}
        self._wake_at_s: float | None = None

    def step(self, now_s: float, event: TierEvent) -> tuple[TierEffect, ...]:
        effects = self._handle(now_s, event)
        for effect in effects:
            if isinstance(effect, _JOBS):
                assert effect.job not in self._running, f"job {effect.job} starts twice"
                self._running[effect.job] = effect
                if isinstance(effect, Remove):
                    self._removals.ordered(effect)
                    self._saves.overtaken(effect.tier, effect.keys)
        return (*effects, *self._wake())

    def _handle(self, now_s: float, event: TierEvent) -> list[TierEffect]:
        match event:
            case LookupAsked():
                return self._lookups.ask(now_s, event)
            case LoadAsked():
                return self._loads.ask(now_s, event)
            case SaveAsked():
                return self._saves.ask(now_s, event)
            case RemovalAsked():
                self._saves.revoke(event.keys)
                return self._removals.ask(now_s, event)
            case WarmAsked():
                return self._warm(now_s, event)
            case PrefillSeen():
                self.shared.prefill.observe(event.tokens, event.seconds)
                return []
            case FetchSeen():
                self._tier(event.tier).rate.observe(event.fetched_bytes, event.seconds)
                return []
            case ObjectsFound():
                return self._found(now_s, event)
            case Woke():
                return self._woke(now_s)
        return self._job_ended(now_s, event)

    def _job_ended(
        self, now_s: float, event: Probed | Fetched | Written | Checked | Removed | Transferred | Pinged
    ) -> list[TierEffect]:
        job = self._running.pop(event.job)
        assert isinstance(job, _JOBS)
        match event, job:
            case Probed(), Probe():
                return self._lookups.probed(now_s, event, self._tier(job.tier))
            case Fetched(), Fetch():
                return self._fetched(now_s, event, job)
            case Written(), Write():
                tier = self._tier(job.tier)
                started = tier.writes.done(answered=event.outcome not in FAILURES)
                return [*started, *self._saves.written(now_s, event, tier)]
            case Checked(), Check():
                return self._saves.checked(now_s, event, self._tier(job.tier))
            case Removed(), Remove():
                effects = self._removals.removed(now_s, event)
                self.shared.removed(job)
                return effects + self._saves.gone(now_s, self._tier(job.tier), job.keys)
            case Transferred(), Transfer():
                started_reads = self._tier(job.source).reads.done(answered=event.outcome not in FAILURES)
                return [*started_reads, *self._saves.transferred(now_s, event)]
            case Pinged(), Ping():
                return self._pinged(now_s, event, self._tier(job.tier))
        raise AssertionError(f"{type(event).__name__} answers {type(job).__name__}")

    def _fetched(self, now_s: float, event: Fetched, job: Fetch) -> list[TierEffect]:
        tier = self._tier(job.tier)
        effects: list[TierEffect] = list(tier.reads.done(answered=event.outcome not in FAILURES))
        if self._lookups.is_sample(job.job):
            self._lookups.sampled(now_s, job.job, event.outcome, event.moved_bytes)
            return effects + self.shared.heard(now_s, tier, event.outcome)
        if event.outcome is Outcome.HIT:
            effects += self._saves.loaded(now_s, job.key, tier)
        return effects + self._loads.fetched(now_s, event, tier)

    def _warm(self, now_s: float, event: WarmAsked) -> list[TierEffect]:
        """From the nearest tier that has them; what is not there costs each tier one read that answers `miss`."""
        effects: list[TierEffect] = []
        nearest, below = self.shared.tiers[0], tuple(tier for tier in self.shared.tiers[1:] if tier.in_use)
        for key in event.keys:
            effects += self._saves.copy(now_s, key, below, nearest)
        return effects

    def _found(self, now_s: float, event: ObjectsFound) -> list[TierEffect]:
        tier = self._tier(event.tier)
        for key, stored_bytes, age_s in event.objects:
            if key not in tier.ledger and not tier.ledger.reserves(key):
                tier.unannounced += event.late
                tier.ledger.commit(key, stored_bytes, now_s, age_s=age_s)
        return self._saves.make_room(now_s, tier, 0)

    def _pinged(self, now_s: float, event: Pinged, tier: TierState) -> list[TierEffect]:
        if not tier.breaker.pinged(now_s, self.shared.draw(), answered=event.answered):
            return []
        tier.reads.begin_gently()
        tier.writes.begin_gently()
        return [TierStateChanged(tier.index, in_use=True), *self._removals.returned(now_s, tier)]

    def _woke(self, now_s: float) -> list[TierEffect]:
        self._wake_at_s = None
        effects = [*self._lookups.overdue(now_s), *self._loads.overdue(now_s), *self._saves.overdue(now_s)]
        for tier in self.shared.tiers:
            if tier.breaker.should_ping(now_s):
                effects.append(Ping(self.shared.new_job(), tier.index, now_s + PING_DEADLINE_S))
            old = tuple(tier.ledger.expired(now_s))
            for key in old:
                tier.ledger.remove(key)
            if old:
                self.shared.count(tier.index, "evict", Outcome.EXPIRED, times=len(old))
                effects.append(self.shared.remove(now_s, tier, old, why="expired"))
        return effects

    def _wake(self) -> list[TierEffect]:
        times = [self._lookups.next_deadline_s(), self._loads.next_deadline_s(), self._saves.next_deadline_s()]
        for tier in self.shared.tiers:
            times += [tier.breaker.ping_at_s, tier.ledger.next_expiry_s()]
        at_s = min((time for time in times if time is not None), default=None)
        if at_s is None or at_s == self._wake_at_s:
            return []
        self._wake_at_s = at_s
        return [WakeAt(at_s)]

    def _tier(self, index: int) -> TierState:
        return self.shared.tiers[index]

    def check(self) -> None:
        """Invariants; for tests after every step."""
        self._loads.check()
        for tier in self.shared.tiers:
            tier.ledger.check()
