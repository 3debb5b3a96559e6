"""What we booked on each worker: the load that our own dispatches cause, known before any worker can report it.

Booked at dispatch, corrected at the first token, taken back exactly once at the end, whatever the end is. What workers
report of themselves is kept beside it and never mixed in: only the part that our own bookings at the time of the report
cannot explain (other gateways, direct clients) is added to the load, so that a stale gauge neither hides a burst nor
counts it twice.

Numbers are kept per slot as plain Python numbers, since every request changes a few of them and numpy's single elements
are slow; scorers, which look at hundreds of slots at once, get an array in which only the changed columns are renewed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from msgspec import Struct

from kvrelay.core.load.fading import Fading
from kvrelay.core.load.growth import Growth
from kvrelay.core.load.prefill_rate import PrefillRates, Sample
from kvrelay.core.load.siblings import SiblingLoads
from kvrelay.core.model.arrays import Floats
from kvrelay.core.model.siblings import SiblingLoad

KINDS = ("active_requests", "queued_requests", "active_prefill_tokens", "active_decode_blocks", "foreign_requests")
ACTIVE, QUEUED, PREFILL, DECODE, FOREIGN = range(len(KINDS))
RECENT = len(KINDS)  # the row of `recent_tokens`, which is not load but breaks ties
GENERATING = RECENT + 1  # the row of requests past their first token, foreign ones included
_ROWS = GENERATING + 1

_HALF_COMPUTED = 0.5  # of what was booked; where less was really computed, the prefill teaches no rate
_RECENT_HALF_LIFE_S = 60.0
_RECENT_RESCALE_S = 600.0


class Booking(Struct):
    """One dispatched request. `prefilling` until its first token."""

    slot: int
    prefill_tokens: int
    decode_blocks: int
    prefilling: bool = True
    sample: Sample | None = None  # what its prefill taught of the worker's rate


class SlotLoad(Struct):
    """Load of one slot; what we booked, what is foreign, and what does not count as load but belongs to the slot."""

    active_requests: int = 0
    queued_requests: int = 0  # dispatched, no token yet
    active_prefill_tokens: int = 0
    active_decode_blocks: int = 0
    foreign_requests: int = 0  # reported beyond what we booked
    elsewhere: tuple[int, int, int, int] = (0, 0, 0, 0)  # the first four kinds, booked by sibling processes
    prefilled_tokens: int = 0  # finished for us since the slot began
    recent_tokens: float = 0.0  # prefill placed lately; only comparisons between slots mean anything
    reported: tuple[int | None, int | None, float | None] = (None, None, None)  # running, waiting, KV usage

    def kinds(self) -> tuple[int, int, int, int, int]:
        """All load that we know of, whoever causes it: `KINDS` in order."""
        active, queued, prefill_tokens, decode_blocks = self.elsewhere
        return (
            self.active_requests + active,
            self.queued_requests + queued,
            self.active_prefill_tokens + prefill_tokens,
            self.active_decode_blocks + decode_blocks,
            self.foreign_requests,
        )


class Ledger:
    """Booked load per slot."""

    def __init__(self, *, initial_prefill_tokens_per_s: float) -> None:
        self.slots: list[SlotLoad] = []
        self.version = 0
        self.rates = PrefillRates(initial_tokens_per_s=initial_prefill_tokens_per_s)
        self.growth = Growth()
        self.prefilling_requests = 0  # over all slots; with none there is no backlog to work out
        self.foreign_requests = 0  # over all slots
        self.siblings = SiblingLoads()
        self._bookings: dict[str, Booking] = {}
        self._fading = Fading(half_life_s=_RECENT_HALF_LIFE_S, rescale_s=_RECENT_RESCALE_S)
        self._mean_prefill_tokens: float | None = None
        self._table: Floats = np.zeros((_ROWS, 0))
        self._changed: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._bookings)

    def add_slot(self, slot: int) -> None:
        """Start a slot at zero."""
        if slot == len(self.slots):
            self.slots.append(SlotLoad())
            self._table = np.hstack([self._table, np.zeros((_ROWS, 1))])
        self.rates.add_slot(slot)
        self.growth.add_slot(slot)
        self._clear(slot)

    def drop_slot(self, slot: int) -> None:
        """Forget a slot with all its bookings; their later ends find nothing and change nothing."""
        self._bookings = {r: b for r, b in self._bookings.items() if b.slot != slot}
        self.prefilling_requests -= self.slots[slot].queued_requests
        self.growth.drop_slot(slot)
        self._clear(slot)

    def table(self) -> Floats:
        """A row per kind of load, then `RECENT` and `GENERATING`; a column per slot. Take from it, do not keep it."""
        table = self._table
        for slot in self._changed:
            load = self.slots[slot]
            kinds = load.kinds()
            generating = kinds[ACTIVE] - kinds[QUEUED] + kinds[FOREIGN]
            table[:, slot] = (*kinds, load.recent_tokens, generating)
        self._changed.clear()
        return table

    def book(self, now: float, request_id: str, slot: int, *, prefill_tokens: int, decode_blocks: int) -> None:
        """The request goes to `slot`, which will have to prefill `prefill_tokens` and then hold `decode_blocks`."""
        assert request_id not in self._bookings, f"{request_id} is booked already"
        self._bookings[request_id] = Booking(slot, prefill_tokens, decode_blocks)
        load = self._touch(slot)
        self.rates.backlog_grew(now, slot, was_empty=not load.queued_requests)
        self.prefilling_requests += 1
        load.active_requests += 1
        load.queued_requests += 1
        load.active_prefill_tokens += prefill_tokens
        load.recent_tokens += prefill_tokens * self._weight(now)
        self._mean_prefill_tokens = self.mean_prefill_tokens(prefill_tokens) * 0.95 + prefill_tokens * 0.05

    def forget_old_rate(self, now: float, slot: int) -> None:
        """See `PrefillRates.forget_old`; of a worker that has prefill to do nothing is forgotten."""
        if not self.slots[slot].queued_requests:
            self.rates.forget_old(now, slot)

    def first_token(self, now: float, request_id: str) -> None:
        """Prefill is over: its tokens leave the load, its blocks enter it. Counts once."""
        booking = self._bookings.get(request_id)
        if booking is None or not booking.prefilling:
            return
        load = self._touch(booking.slot)
        self._end_prefill(load, booking)
        waiting_tokens = load.active_prefill_tokens + load.elsewhere[PREFILL]
        booking.sample = self.rates.prefill_done(
            now, booking.slot, booking.prefill_tokens, waiting_tokens=waiting_tokens
        )
        load.active_decode_blocks += booking.decode_blocks
        load.prefilled_tokens += booking.prefill_tokens

    def settle(self, now: float, request_id: str, *, computed_tokens: int | None = None) -> bool:
        """The request left the worker, for whatever reason. False when nothing was booked (any more).

        `computed_tokens`: of its prompt, where the engine said so."""
        booking = self._bookings.pop(request_id, None)
        if booking is None:
            return False
        load = self._touch(booking.slot)
        least = booking.prefill_tokens * _HALF_COMPUTED
        if booking.sample is not None and computed_tokens is not None and computed_tokens < least:
            self.rates.take_back(booking.slot, booking.sample)
        if booking.prefilling:
            self._end_prefill(load, booking)
            self.rates.prefill_abandoned(now, booking.slot)
        else:
            load.active_decode_blocks -= booking.decode_blocks
        load.active_requests -= 1
        assert load.active_requests >= 0 and load.active_decode_blocks >= 0, f"slot {booking.slot} fell below zero"
        return True

    def report(self, slot: int, *, running: int | None, waiting: int | None, kv_usage_ratio: float | None) -> None:
        """The worker's own gauges, as of now. Without both request gauges nothing is known of foreign load."""
        load = self._touch(slot)
        load.reported = (running, waiting, kv_usage_ratio)
        if running is not None and waiting is not None:
            foreign = max(0, running + waiting - load.active_requests - load.elsewhere[ACTIVE])
            self.foreign_requests += foreign - load.foreign_requests
            load.foreign_requests = foreign

    def booked(self, slot: int, worker: str, rank: int) -> SiblingLoad | None:
        """Our own bookings on a slot, for siblings; None: there are none, and never were."""
        load = self.slots[slot]
        if not load.active_requests and not load.prefilled_tokens:
            return None
        return SiblingLoad(
            worker,
            rank,
            active_requests=load.active_requests,
            queued_requests=load.queued_requests,
            active_prefill_tokens=load.active_prefill_tokens,
            active_decode_blocks=load.active_decode_blocks,
            prefilled_tokens=load.prefilled_tokens,
        )

    def sibling_reported(self, now: float, sibling: int, loads: Mapping[int, SiblingLoad]) -> None:
        """All that a sibling process has booked, by slot; what it said before is forgotten."""
        for slot, done_tokens in self.siblings.replace(sibling, loads):
            load = self._touch(slot)
            before, load.elsewhere = load.elsewhere, self.siblings.of(slot)
            if done_tokens:
                self.rates.prefill_done(now, slot, done_tokens, waiting_tokens=load.kinds()[PREFILL])
            elif load.elsewhere[QUEUED] and not before[QUEUED]:
                self.rates.backlog_grew(now, slot, was_empty=not load.queued_requests)

    def mean_prefill_tokens(self, otherwise: int) -> float:
        """What a request we did not book is likely to need: the recent mean of ours, else `otherwise`."""
        return self._mean_prefill_tokens if self._mean_prefill_tokens is not None else float(otherwise)

    def _touch(self, slot: int) -> SlotLoad:
        self.version += 1
        self._changed[slot] = None
        return self.slots[slot]

    def _weight(self, now: float) -> float:
        fade = self._fading.overdue(now)
        if fade is not None:
            for slot, load in enumerate(self.slots):
                load.recent_tokens *= fade
                self._changed[slot] = None
        return self._fading.weight(now)

    def _end_prefill(self, load: SlotLoad, booking: Booking) -> None:
        booking.prefilling = False
        self.prefilling_requests -= 1
        load.queued_requests -= 1
        load.active_prefill_tokens -= booking.prefill_tokens
        assert load.queued_requests >= 0 and load.active_prefill_tokens >= 0, f"slot {booking.slot} fell below zero"

    def _clear(self, slot: int) -> None:
        self.foreign_requests -= self.slots[slot].foreign_requests
        self.slots[slot] = SlotLoad()
        self.siblings.forget(slot)
        self._touch(slot)

    def check(self) -> None:
        """Assert that every number is the sum of the bookings."""
        table = self.table()
        assert self.prefilling_requests == sum(b.prefilling for b in self._bookings.values())
        assert self.foreign_requests == sum(load.foreign_requests for load in self.slots)
        for slot, load in enumerate(self.slots):
            mine = [b for b in self._bookings.values() if b.slot == slot]
            assert load.active_requests == len(mine)
            assert load.queued_requests == sum(b.prefilling for b in mine)
            assert load.active_prefill_tokens == sum(b.prefill_tokens for b in mine if b.prefilling)
            assert load.active_decode_blocks == sum(b.decode_blocks for b in mine if not b.prefilling)
            assert load.foreign_requests >= 0
            assert load.elsewhere == self.siblings.of(slot)
            active, queued, _, _, foreign = load.kinds()
            assert tuple(table[:, slot]) == (*load.kinds(), load.recent_tokens, active - queued + foreign)
