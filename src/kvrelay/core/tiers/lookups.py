"""How much of a prompt could be loaded, asked tier by tier, the nearest first."""

from __future__ import annotations

from msgspec import Struct

from kvrelay.core.tiers.breakeven import BreakEven, decide
from kvrelay.core.tiers.effects import Fetch, LookupAnswered, Probe, TierEffect
from kvrelay.core.tiers.events import LookupAsked, Probed
from kvrelay.core.tiers.outcome import Outcome
from kvrelay.core.tiers.tier import Shared, TierState


class _Lookup(Struct):
    asked: LookupAsked
    places: list[list[int]]
    next_tier: int = 0
    job: int | None = None
    job_tier: int = -1
    unasked: list[int] = []


class Lookups:
    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._open: dict[int, _Lookup] = {}
        self._by_job: dict[int, _Lookup] = {}
        self._samples: dict[int, tuple[TierState, float]] = {}

    def ask(self, now_s: float, asked: LookupAsked) -> list[TierEffect]:
        lookup = _Lookup(asked, [[] for _ in asked.keys])
        self._open[asked.lookup] = lookup
        return self._go_on(now_s, lookup)

    def probed(self, now_s: float, event: Probed, tier: TierState) -> list[TierEffect]:
        """A late answer still tells about the tier's health, and nothing else."""
        outcome = Outcome.HIT if event.present is not None else event.outcome
        self._shared.count(tier.index, "lookup", outcome)
        effects = self._shared.heard(now_s, tier, outcome)
        lookup = self._by_job.pop(event.job, None)
        if lookup is None:
            return effects
        if event.present is None:
            lookup.unasked.append(tier.index)
        else:
            self._note(now_s, lookup, tier, event.present)
        return effects + self._go_on(now_s, lookup)

    def overdue(self, now_s: float) -> list[TierEffect]:
        """Answer with what is known; a tier that still owes its answer counts as silent."""
        effects: list[TierEffect] = []
        for lookup in [lookup for lookup in self._open.values() if lookup.asked.deadline_s <= now_s]:
            if lookup.job is not None and self._by_job.pop(lookup.job, None) is not None:
                tier = self._shared.tiers[lookup.job_tier]
                self._shared.count(tier.index, "lookup", Outcome.TIMEOUT)
                effects += self._shared.silent(now_s, tier)
                lookup.unasked.append(tier.index)
            effects += self._answer(now_s, lookup)
        return effects

    def next_deadline_s(self) -> float | None:
        return min([lookup.asked.deadline_s for lookup in self._open.values()]) if self._open else None

    def sampled(self, now_s: float, job: int, outcome: Outcome, moved_bytes: int) -> None:
        """A measurement of a tier that break-even leaves unused."""
        tier, began_s = self._samples.pop(job)
        if outcome is Outcome.HIT:
            tier.rate.observe(moved_bytes, now_s - began_s)

    def is_sample(self, job: int) -> bool:
        return job in self._samples

    def _note(self, now_s: float, lookup: _Lookup, tier: TierState, present: tuple[bool, ...]) -> None:
        missing = [i for i, places in enumerate(lookup.places) if not places]
        for i, there in zip(missing, present, strict=True):
            key = lookup.asked.keys[i]
            if there and not self._shared.shunned[tier.index].has(key, now_s):
                lookup.places[i].append(tier.index)

    def _go_on(self, now_s: float, lookup: _Lookup) -> list[TierEffect]:
        lookup.job = None
        while lookup.next_tier < len(self._shared.tiers):
            tier = self._shared.tiers[lookup.next_tier]
            lookup.next_tier += 1
            missing = tuple(key for key, places in zip(lookup.asked.keys, lookup.places, strict=True) if not places)
            if not missing:
                break
            if not tier.in_use or now_s >= lookup.asked.deadline_s:
                lookup.unasked.append(tier.index)
                self._shared.count(tier.index, "lookup", Outcome.UNAVAILABLE)
                continue
            if tier.settings.index:
                self._shared.count(tier.index, "lookup", Outcome.HIT)
                self._note(now_s, lookup, tier, tuple(key in tier.ledger for key in missing))
                continue
            lookup.job, lookup.job_tier = self._shared.new_job(), tier.index
            self._by_job[lookup.job] = lookup
            return [Probe(lookup.job, tier.index, missing, lookup.asked.deadline_s)]
        return self._answer(now_s, lookup)

    def _answer(self, now_s: float, lookup: _Lookup) -> list[TierEffect]:
        del self._open[lookup.asked.lookup]
        leading = 0
        while leading < len(lookup.places) and lookup.places[leading]:
            leading += 1
        places = tuple(tuple(found) for found in lookup.places[:leading])
        verdict = self._break_even(lookup.asked, places)
        effects: list[TierEffect] = []
        if not verdict.fetch:
            effects += self._sample(now_s, lookup.asked, places)
        return [*effects, LookupAnswered(lookup.asked.lookup, places, verdict, tuple(lookup.unasked))]

    def _break_even(self, asked: LookupAsked, places: tuple[tuple[int, ...], ...]) -> BreakEven:
        """Tiers are asked one after another in the worst case, so their times add up."""
        chunks: dict[int, int] = {}
        for found in places:
            chunks[found[0]] = chunks.get(found[0], 0) + 1
        times = [self._shared.tiers[i].rate.predict_s(n * asked.chunk_bytes) for i, n in chunks.items()]
        fetch_s = None if None in times or not times else sum(time for time in times if time is not None)
        recompute_s = self._shared.prefill.predict_s(len(places) * asked.chunk_tokens)
        verdict = decide(fetch_s, recompute_s)
        if not self._shared.settings.break_even or not places:
            return BreakEven(True, verdict.fetch_ms, verdict.recompute_ms)
        return verdict

    def _sample(self, now_s: float, asked: LookupAsked, places: tuple[tuple[int, ...], ...]) -> list[TierEffect]:
        """Measure a tier that is not used once in a while, or it would stay slow in our mind forever."""
        effects: list[TierEffect] = []
        for i, found in enumerate(places):
            tier = self._shared.tiers[found[0]]
            self._shared.count(tier.index, "fetch", Outcome.SKIPPED)
            if now_s < tier.sample_due_s or tier.reads.running:
                continue
            tier.sample_due_s = now_s + self._shared.settings.sample_interval_s
            job = self._shared.new_job()
            self._samples[job] = (tier, now_s)
            deadline_s = now_s + self._shared.settings.write_deadline_s
            effects += tier.reads.submit(Fetch(job, tier.index, asked.keys[i], None, 0, deadline_s))
        return effects
