"""Fetching chunks: one fetch per key at a time, bounded per tier, all in time or not at all.

A key that somebody is fetching already is not fetched again: the second load waits for the same flight and gets a copy.
When the first load's time is up before the flight is over, its destination is no longer written to, and the flight's
bytes are lost; whoever still waits has it fetched again for itself.
"""

from __future__ import annotations

from msgspec import Struct

from kvrelay.core.tiers.effects import Copy, Fetch, LoadFinished, TierEffect
from kvrelay.core.tiers.events import Fetched, LoadAsked
from kvrelay.core.tiers.outcome import FAILURES, Outcome
from kvrelay.core.tiers.tier import Shared, TierState

Place = tuple[int, int]  # load, position in it


class _Load(Struct):
    asked: LoadAsked
    outcomes: list[Outcome | None]
    tried: list[int]  # per key: how many of its places
    began_s: list[float | None]  # per tier
    ended_s: list[float]
    moved_bytes: list[int]
    waiting: int  # keys without an outcome
    found_in: list[int | None]  # per key: the tier of a hit

    def end(self, position: int, outcome: Outcome) -> None:
        """The outcome of one key, for good."""
        assert self.outcomes[position] is None, f"key {position} ends twice"
        self.outcomes[position] = outcome
        self.waiting -= 1


class _Flight(Struct):
    fetch: Fetch
    owner: Place
    followers: list[Place] = []
    overdue: bool = False  # counted as `timeout` already: the owner's time was up before it ended


class Loads:
    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._open: dict[int, _Load] = {}
        self._flights: dict[int, _Flight] = {}
        self._by_key: dict[tuple[int, bytes], int] = {}

    def ask(self, now_s: float, asked: LoadAsked) -> list[TierEffect]:
        tiers = len(self._shared.tiers)
        keys = len(asked.keys)
        load = _Load(
            asked, [None] * keys, [0] * keys, [None] * tiers, [now_s] * tiers, [0] * tiers, keys, [None] * keys
        )
        self._open[asked.load] = load
        effects: list[TierEffect] = []
        for position in range(len(asked.keys)):
            effects += self._try_next(now_s, load, position, Outcome.MISS)
        return effects + self._finish_if_done(now_s, load)

    def fetched(self, now_s: float, event: Fetched, tier: TierState) -> list[TierEffect]:
        flight = self._flights.pop(event.job)
        del self._by_key[tier.index, flight.fetch.key]
        if not flight.overdue:
            self._shared.count(tier.index, "fetch", event.outcome)
        effects = self._shared.heard(now_s, tier, event.outcome)
        if event.outcome is Outcome.HIT:
            tier.ledger.touch(flight.fetch.key, now_s)
            self._shared.count_bytes(tier.index, "read", event.moved_bytes)
        elif event.outcome not in (*FAILURES, Outcome.SKIPPED):
            self._shared.phantoms += event.outcome is Outcome.MISS
            effects += self._shared.dropped(now_s, tier, flight.fetch.key, event.outcome)
        return effects + self._settle(now_s, flight, event, tier)

    def overdue(self, now_s: float) -> list[TierEffect]:
        """What is not there now is too late."""
        effects: list[TierEffect] = []
        for load in [load for load in self._open.values() if load.asked.deadline_s <= now_s]:
            effects += self._give_up(now_s, load)
        return effects

    def next_deadline_s(self) -> float | None:
        return min([load.asked.deadline_s for load in self._open.values()]) if self._open else None

    @property
    def flights(self) -> int:
        return len(self._flights)

    def check(self) -> None:
        """Invariants."""
        assert len(self._by_key) == len(self._flights), "two flights for one key"
        for number, load in self._open.items():
            assert load.waiting == load.outcomes.count(None) > 0, f"load {number} is over and still open"
            for position, outcome in enumerate(load.outcomes):
                waits = [
                    f
                    for f in self._flights.values()
                    if f.owner == (number, position) or (number, position) in f.followers
                ]
                assert len(waits) == (outcome is None), (
                    f"key {position} of load {number} waits for {len(waits)} flights"
                )

    def _try_next(self, now_s: float, load: _Load, position: int, so_far: Outcome) -> list[TierEffect]:
        """Fetch from the next place of this key that is in use, or take `so_far` for its outcome."""
        places = load.asked.places[position]
        while load.tried[position] < len(places):
            tier = self._shared.tiers[places[load.tried[position]]]
            load.tried[position] += 1
            if tier.in_use:
                return self._fly(now_s, load, position, tier)
            so_far = Outcome.UNAVAILABLE
            self._shared.count(tier.index, "fetch", so_far)
        load.end(position, so_far)
        return []

    def _fly(self, now_s: float, load: _Load, position: int, tier: TierState) -> list[TierEffect]:
        key, place = load.asked.keys[position], (load.asked.load, position)
        if load.began_s[tier.index] is None:
            load.began_s[tier.index] = now_s
        under_way = self._by_key.get((tier.index, key))
        if under_way is not None:
            self._flights[under_way].followers.append(place)
            return []
        job = self._shared.new_job()
        wishes = {above.settings.promote for above in self._shared.tiers[: tier.index]}
        keep = "always" in wishes or ("second_sight" in wishes and self._shared.seen(key))
        fetch = Fetch(job, tier.index, key, *place, load.asked.deadline_s, keep)
        self._flights[job] = _Flight(fetch, place)
        self._by_key[tier.index, key] = job
        return list(tier.reads.submit(fetch))

    def _settle(self, now_s: float, flight: _Flight, event: Fetched, tier: TierState) -> list[TierEffect]:
        effects: list[TierEffect] = []
        owner = self._waiting(flight.owner)
        arrived = event.outcome is Outcome.HIT and owner is not None
        concerned = [] if owner is None else [flight.owner]
        concerned += [place for place in flight.followers if self._waiting(place) is not None]
        if arrived:
            effects += [Copy(*flight.owner, *place) for place in concerned[1:]]
        for number, position in concerned:
            load = self._open[number]
            if arrived:
                load.end(position, Outcome.HIT)
                load.found_in[position] = tier.index
                load.ended_s[tier.index] = now_s
                load.moved_bytes[tier.index] += event.moved_bytes if (number, position) == flight.owner else 0
            elif event.outcome in (Outcome.HIT, Outcome.SKIPPED):  # too late for the one that it was fetched for
                effects += self._fly(now_s, load, position, tier)
            elif self._shared.settings.failure_policy == "fallback":
                effects += self._try_next(now_s, load, position, event.outcome)
            else:
                load.end(position, event.outcome)
                effects += self._withdraw_after(load, position)
        for number in dict.fromkeys(number for number, _ in concerned):
            effects += self._finish_if_done(now_s, self._open[number])
        return effects

    def _withdraw_after(self, load: _Load, position: int) -> list[TierEffect]:
        """A chunk is of no use without those before it: what has not started need not."""
        for number, flight in list(self._flights.items()):
            mine = flight.owner[0] == load.asked.load and flight.owner[1] > position
            if not mine or flight.followers:
                continue
            tier = self._shared.tiers[flight.fetch.tier]
            if tier.reads.withdraw(lambda work, number=number: work.job == number):  # type: ignore[misc]
                del self._flights[number]
                del self._by_key[tier.index, flight.fetch.key]
                load.end(flight.owner[1], Outcome.SKIPPED)
                self._shared.count(tier.index, "fetch", Outcome.SKIPPED)
        return []

    def _give_up(self, now_s: float, load: _Load) -> list[TierEffect]:
        effects: list[TierEffect] = []
        silent: dict[int, None] = {}
        for position, outcome in enumerate(load.outcomes):
            if outcome is not None:
                continue
            place = (load.asked.load, position)
            load.end(position, Outcome.TIMEOUT)
            for number, flight in list(self._flights.items()):
                if place in flight.followers:
                    flight.followers.remove(place)
                elif flight.owner == place:
                    tier = self._shared.tiers[flight.fetch.tier]
                    if not tier.reads.withdraw(lambda work, number=number: work.job == number):  # type: ignore[misc]
                        silent[tier.index] = None
                        flight.overdue = True
                        self._shared.count(tier.index, "fetch", Outcome.TIMEOUT)
                    elif not self._hand_over(flight):
                        del self._flights[number]
                        del self._by_key[tier.index, flight.fetch.key]
                        self._shared.count(tier.index, "fetch", Outcome.TIMEOUT)
                    else:
                        effects += tier.reads.submit(flight.fetch)
        for index in silent:
            effects += self._shared.silent(now_s, self._shared.tiers[index])
        return effects + self._finish_if_done(now_s, load)

    def _hand_over(self, flight: _Flight) -> bool:
        """A flight that has not started goes on for the first of those who wait for it."""
        if not flight.followers:
            return False
        flight.owner = flight.followers.pop(0)
        load = self._open[flight.owner[0]]
        old = flight.fetch
        flight.fetch = Fetch(old.job, old.tier, old.key, *flight.owner, load.asked.deadline_s, old.keep)
        return True

    def _waiting(self, place: Place) -> _Load | None:
        load = self._open.get(place[0])
        return load if load is not None and load.outcomes[place[1]] is None else None

    def _finish_if_done(self, now_s: float, load: _Load) -> list[TierEffect]:
        if load.waiting:
            return []
        del self._open[load.asked.load]
        outcomes = tuple(outcome for outcome in load.outcomes if outcome is not None)
        seconds = tuple(
            0.0 if begun is None else max(0.0, ended - begun)
            for begun, ended in zip(load.began_s, load.ended_s, strict=True)
        )
        for tier, moved, duration_s in zip(self._shared.tiers, load.moved_bytes, seconds, strict=True):
            if moved:
                tier.rate.observe(moved, duration_s)
        failed = self._shared.settings.failure_policy == "fail" and any(o is not Outcome.HIT for o in outcomes)
        found_in = tuple(load.found_in)
        return [LoadFinished(load.asked.load, outcomes, failed, tuple(load.moved_bytes), seconds, found_in)]
