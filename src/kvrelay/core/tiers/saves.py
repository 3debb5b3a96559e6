"""Keeping objects: write, verify, commit, announce; then copies between tiers.

Nothing counts as stored because a write returned: the tier is asked what it kept. A payload in several pieces becomes
readable by its manifest, which is written when every piece has been verified, and not before.
"""

from __future__ import annotations

from msgspec import Struct

from kvrelay.core.tiers.effects import Announce, Check, SaveFinished, TierEffect, Transfer, Write
from kvrelay.core.tiers.events import Checked, SaveAsked, Transferred, Written
from kvrelay.core.tiers.outcome import Outcome
from kvrelay.core.tiers.tier import Shared, TierState

EVICTED = "evicted"


class _Save(Struct):
    asked: SaveAsked
    deadline_s: float
    outcomes: list[Outcome | None]  # per tier


class _Target(Struct, eq=False):
    """One save in one tier: pieces that are verified so far, out of all of them and the manifest.

    `awaits`: keys that have to be gone before there is room, or, not yet `admitted`, its own, while that is deleted or
    written by somebody else: what one of two writers takes back must not be what the other one has verified."""

    save: _Save
    tier: TierState
    awaits: set[bytes] = set()
    admitted: bool = False
    stored_before: bool = False
    started: bool = False
    verified: int = 0
    existed: bool = False
    revoked: bool = False

    @property
    def writes_in_all(self) -> int:
        return 1 if self.save.asked.pieces == 1 else self.save.asked.pieces + 1


class _Copying(Struct):
    """`further`: where else the key may be found. `evicts`: the source gives it up afterwards."""

    source: TierState
    target: TierState
    key: bytes
    further: tuple[TierState, ...]
    evicts: bool


class Saves:
    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._open: dict[int, _Save] = {}
        self._targets: dict[int, _Target] = {}
        self._copying: dict[int, _Copying] = {}
        self._copied: dict[tuple[int, bytes], int] = {}
        self._held: list[_Target] = []

    def ask(self, now_s: float, asked: SaveAsked) -> list[TierEffect]:
        deadline_s = now_s + self._shared.settings.write_deadline_s
        save = _Save(asked, deadline_s, [None] * len(self._shared.tiers))
        self._open[asked.save] = save
        effects: list[TierEffect] = []
        second_sight = self._shared.seen_before(asked.key)
        for tier in self._shared.tiers:
            wanted = tier.settings.write == "through" or (tier.settings.write == "selective" and second_sight)
            save.outcomes[tier.index] = Outcome.SKIPPED if not wanted else self._obstacle(tier, asked)
            if save.outcomes[tier.index] is not None:
                self._shared.count(tier.index, "store", save.outcomes[tier.index] or Outcome.SKIPPED)
                continue
            effects += self._admit(now_s, _Target(save, tier))
        return effects + self._finish_if_done(save)

    def gone(self, now_s: float, tier: TierState, keys: tuple[bytes, ...]) -> list[TierEffect]:
        """Keys have left a tier, or cannot be made to, or nobody writes them any more: what waited for their room or
        name is written."""
        effects: list[TierEffect] = []
        for target in list(self._held):
            if target.tier is tier and target in self._held:  # one that ends here may set others going
                target.awaits.difference_update([key for key in keys if not self._taken(tier, key)])
                if not target.awaits:
                    self._held.remove(target)
                    effects += self._go_on(now_s, target)
        return effects

    def overdue(self, now_s: float) -> list[TierEffect]:
        """A save that is not over now has failed where it is not: what still lands is taken back."""
        effects: list[TierEffect] = []
        silent: dict[int, None] = {}
        for target in [*self._targets.values(), *self._held]:
            if target.save.deadline_s <= now_s and target.save.outcomes[target.tier.index] is None:
                target.revoked = True
                target.save.outcomes[target.tier.index] = Outcome.TIMEOUT
                self._shared.count(target.tier.index, "store", Outcome.TIMEOUT)
                silent[target.tier.index] = None
        for save in [save for save in self._open.values() if save.deadline_s <= now_s]:
            effects += self._finish_if_done(save)
        for index in silent:
            effects += self._shared.silent(now_s, self._shared.tiers[index])
        return effects

    def next_deadline_s(self) -> float | None:
        return min([save.deadline_s for save in self._open.values()]) if self._open else None

    def written(self, now_s: float, event: Written, tier: TierState) -> list[TierEffect]:
        target = self._targets.pop(event.job)
        effects = self._shared.heard(now_s, tier, event.outcome)
        if event.outcome is not Outcome.STORED:
            return effects + self._end(now_s, target, event.outcome)
        target.existed = event.existed
        asked = target.save.asked
        job = self._shared.new_job()
        self._targets[job] = target
        deadline_s = now_s + self._shared.settings.write_deadline_s
        return [*effects, Check(job, tier.index, asked.key, asked.save, target.verified, deadline_s)]

    def checked(self, now_s: float, event: Checked, tier: TierState) -> list[TierEffect]:
        target = self._targets.pop(event.job)
        effects = self._shared.heard(now_s, tier, event.outcome)
        if event.outcome is not Outcome.HIT:
            return effects + self._end(now_s, target, event.outcome)
        target.verified += 1
        if target.verified < target.writes_in_all and not target.revoked:
            return effects + self._write(now_s, target)
        return effects + self._end(now_s, target, Outcome.STORED)

    def loaded(self, now_s: float, key: bytes, source: TierState) -> list[TierEffect]:
        """A key was loaded from a tier: the ones above it may want a copy."""
        if source.index == 0:
            return []
        effects: list[TierEffect] = []
        second_sight = self._shared.seen_before(key)
        for tier in self._shared.tiers[: source.index]:
            wish = tier.settings.promote
            if wish == "always" or (wish == "second_sight" and second_sight):
                effects += self.copy(now_s, key, (source,), tier)
        return effects

    def copy(
        self, now_s: float, key: bytes, sources: tuple[TierState, ...], target: TierState, *, evicts: bool = False
    ) -> list[TierEffect]:
        """Copy a stored object in the background, from the first of `sources` that has it; once at a time."""
        if not sources or not target.in_use or (target.index, key) in self._copied or key in target.ledger:
            return []
        job = self._shared.new_job()
        self._copying[job] = _Copying(sources[0], target, key, sources[1:], evicts)
        self._copied[target.index, key] = job
        deadline_s = now_s + self._shared.settings.write_deadline_s
        return list(sources[0].reads.submit(Transfer(job, sources[0].index, target.index, key, deadline_s)))

    def transferred(self, now_s: float, event: Transferred) -> list[TierEffect]:
        copying = self._copying.pop(event.job)
        target, key = copying.target, copying.key
        del self._copied[target.index, key]
        self._shared.count(target.index, "copy", event.outcome)
        effects: list[TierEffect] = []
        if event.outcome is Outcome.MISS and copying.further:
            return self.copy(now_s, key, copying.further, target)
        if event.outcome is Outcome.STORED:
            self._shared.count_bytes(target.index, "written", event.stored_bytes)
            if self._shared.revoked.has(key, now_s):
                effects.append(self._shared.remove(now_s, target, (key,), why="revoked"))
            elif not target.ledger.fits(event.stored_bytes):
                effects.append(self._shared.remove(now_s, target, (key,), why=EVICTED))
            else:
                if not target.ledger.reserves(key):  # else who writes it keeps the books
                    effects += self.make_room(now_s, target, event.stored_bytes)
                    target.ledger.commit(key, event.stored_bytes, now_s)
                self._shared.shunned[target.index].discard(key)
                effects.append(Announce(target.index, key, event.stored_bytes))
        if copying.evicts:
            effects.append(self._shared.remove(now_s, copying.source, (key,), why=EVICTED))
        return effects

    def make_room(self, now_s: float, tier: TierState, size: int) -> list[TierEffect]:
        """Evict what has to go before `size` more bytes fit."""
        return self._evict(now_s, tier, tier.ledger.victims(size))

    def revoke(self, keys: tuple[bytes, ...]) -> None:
        """Deleted while being written: the write is undone when it is over."""
        for target in [*self._targets.values(), *self._held]:
            if target.save.asked.key in keys:
                target.revoked = True

    def overtaken(self, tier: int, keys: tuple[bytes, ...]) -> None:
        """A deletion was ordered in one tier: whoever is writing these keys there may have pieces deleted that it has
        verified, and must not publish."""
        for target in self._targets.values():
            if target.tier.index == tier and target.save.asked.key in keys:
                target.revoked = True

    @property
    def under_way(self) -> int:
        return len(self._targets) + len(self._copying) + len(self._held)

    def _taken(self, tier: TierState, key: bytes) -> bool:
        """Is a key of a tier being deleted or written?"""
        admitted = (*self._targets.values(), *(held for held in self._held if held.admitted))
        return (tier.index, key) in self._shared.removing or any(
            one.tier is tier and one.save.asked.key == key for one in admitted
        )

    def _admit(self, now_s: float, target: _Target) -> list[TierEffect]:
        """Make room, and write; both only when nobody else is at work on this key."""
        tier, asked = target.tier, target.save.asked
        if self._taken(tier, asked.key):
            target.awaits = {asked.key}
            self._held.append(target)
            return []
        target.admitted = True
        target.stored_before = tier.ledger.reserve(asked.key, asked.stored_bytes)
        leaving = tier.ledger.victims(0)
        effects = self._evict(now_s, tier, leaving)
        target.awaits = set(leaving)
        if not target.awaits:
            return effects + self._write(now_s, target)
        self._held.append(target)
        return effects

    def _go_on(self, now_s: float, target: _Target) -> list[TierEffect]:
        """What it waited for has happened."""
        if target.revoked:
            return self._end(now_s, target, Outcome.SKIPPED)
        if target.admitted:
            return self._write(now_s, target)
        obstacle = self._obstacle(target.tier, target.save.asked)
        return self._admit(now_s, target) if obstacle is None else self._end(now_s, target, obstacle)

    def _obstacle(self, tier: TierState, asked: SaveAsked) -> Outcome | None:
        if not tier.in_use:
            return Outcome.UNAVAILABLE
        if not tier.ledger.fits(asked.stored_bytes):
            return Outcome.NO_SPACE
        if len(tier.writes.waiting) >= self._shared.settings.max_waiting_writes:
            return Outcome.REFUSED
        return None

    def _evict(self, now_s: float, tier: TierState, leaving: list[bytes]) -> list[TierEffect]:
        """Into the tier below if that one takes what was evicted, else away."""
        below = next((t for t in self._shared.tiers[tier.index + 1 :] if t.settings.write == "back"), None)
        effects: list[TierEffect] = []
        for key in leaving:
            self._shared.count(tier.index, "evict", Outcome.STORED)
            copies = [] if below is None else self.copy(now_s, key, (tier,), below, evicts=True)
            under_way = None if below is None else self._copied.get((below.index, key))
            if under_way is None:
                effects.append(self._shared.remove(now_s, tier, (key,), why=EVICTED))
            else:
                self._copying[under_way].evicts = True
                effects += copies
        return effects

    def _write(self, now_s: float, target: _Target) -> list[TierEffect]:
        job, asked = self._shared.new_job(), target.save.asked
        self._targets[job] = target
        target.started = True
        deadline_s = now_s + self._shared.settings.write_deadline_s
        return list(
            target.tier.writes.submit(Write(job, target.tier.index, asked.key, asked.save, target.verified, deadline_s))
        )

    def _end(self, now_s: float, target: _Target, outcome: Outcome) -> list[TierEffect]:
        tier, asked = target.tier, target.save.asked
        effects: list[TierEffect] = []
        if outcome is Outcome.STORED and not target.revoked and target.save.asked.save in self._open:
            tier.ledger.commit(asked.key, asked.stored_bytes, now_s)
            self._shared.shunned[tier.index].discard(asked.key)
            self._shared.count_bytes(tier.index, "written", 0 if target.existed else asked.stored_bytes)
            effects.append(Announce(tier.index, asked.key, asked.stored_bytes))
        else:
            if target.admitted:
                tier.ledger.cancel(asked.key)
            if (
                target.stored_before and target.existed and not target.revoked
            ):  # as far as is known, it still lies there
                tier.ledger.commit(asked.key, asked.stored_bytes, now_s)
            if target.revoked and outcome is Outcome.STORED:
                outcome = Outcome.SKIPPED
            if (
                target.started and not target.existed
            ):  # nothing, a part, or (the answer was lost) all of it: none of it may stay
                effects.append(self._shared.remove(now_s, tier, (asked.key,), why="not stored"))
        if target.save.outcomes[tier.index] is None:
            self._shared.count(tier.index, "store", outcome)
            target.save.outcomes[tier.index] = outcome
        return effects + self._finish_if_done(target.save) + self.gone(now_s, tier, (asked.key,))

    def _finish_if_done(self, save: _Save) -> list[TierEffect]:
        outcomes = tuple(outcome for outcome in save.outcomes if outcome is not None)
        if len(outcomes) < len(save.outcomes) or save.asked.save not in self._open:
            return []
        del self._open[save.asked.save]
        return [SaveFinished(save.asked.save, outcomes)]
