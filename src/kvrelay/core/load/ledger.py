"""What we booked on each worker: the load that our own dispatches cause, known before any worker can report it.

Booked at dispatch, corrected at the first token, taken back exactly once at the end, whatever the end is. What workers
report of themselves is kept beside it and never mixed in: only the part that our own bookings at the time of the report
cannot explain (other gateways, direct clients) is added to the load, so that a stale gauge neither hides a burst nor
counts it twice.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from kvrelay.core.load.prefill_rate import PrefillRates
from kvrelay.core.model.arrays import Floats

_RECENT_HALF_LIFE_S = 60.0
_RECENT_RESCALE_S = 600.0


KINDS = ("active_requests", "queued_requests", "active_prefill_tokens", "active_decode_blocks", "foreign_requests")
ACTIVE, QUEUED, PREFILL, DECODE, FOREIGN = range(len(KINDS))


class Booking(Struct):
    """One dispatched request. `prefilling` until its first token."""

    slot: int
    prefill_tokens: int
    decode_blocks: int
    prefilling: bool = True


class Ledger:
    """Booked load per slot.

    `table` has one row per kind of load (`KINDS`) and one column per slot, so that the load of many candidates is one
    gather; the attributes are views of its rows. Whole numbers, kept as float64 because scorers calculate with them.
    All are owned by the ledger: read them, do not keep them.
    """

    def __init__(self, *, initial_prefill_tokens_per_s: float) -> None:
        self._grow_to(0)
        self.recent_tokens: Floats = np.zeros(0)  # prefill placed lately; only comparisons between slots mean anything
        self.version = 0
        self.rates = PrefillRates(initial_tokens_per_s=initial_prefill_tokens_per_s)
        self.reported: dict[int, tuple[int | None, int | None, float | None]] = {}
        self._bookings: dict[str, Booking] = {}
        self._weigh_from = 0.0
        self._mean_prefill_tokens: float | None = None

    def __len__(self) -> int:
        return len(self._bookings)

    def _grow_to(self, slots: int) -> None:
        table = np.zeros((len(KINDS), slots))
        if slots:
            table[:, : self.table.shape[1]] = self.table
        self.table: Floats = table
        self.active_requests = table[ACTIVE]
        self.queued_requests = table[QUEUED]  # dispatched, no token yet
        self.prefill_tokens = table[PREFILL]
        self.decode_blocks = table[DECODE]
        self.foreign_requests = table[FOREIGN]  # reported beyond what we booked

    def add_slot(self, slot: int) -> None:
        """Start a slot at zero."""
        if slot >= len(self.active_requests):
            more = slot + 1 - len(self.active_requests)
            self._grow_to(slot + 1)
            self.recent_tokens = np.append(self.recent_tokens, np.zeros(more))
        self.rates.add_slot(slot)
        self._clear(slot)

    def drop_slot(self, slot: int) -> None:
        """Forget a slot with all its bookings; their later ends find nothing and change nothing."""
        self._bookings = {r: b for r, b in self._bookings.items() if b.slot != slot}
        self._clear(slot)

    def book(self, now: float, request_id: str, slot: int, *, prefill_tokens: int, decode_blocks: int) -> None:
        """The request goes to `slot`, which will have to prefill `prefill_tokens` and then hold `decode_blocks`."""
        assert request_id not in self._bookings, f"{request_id} is booked already"
        self._bookings[request_id] = Booking(slot, prefill_tokens, decode_blocks)
        self.rates.backlog_grew(now, slot, was_empty=not self.queued_requests[slot])
        self.active_requests[slot] += 1
        self.queued_requests[slot] += 1
        self.prefill_tokens[slot] += prefill_tokens
        self._placed(now, slot, prefill_tokens)
        self._mean_prefill_tokens = self.mean_prefill_tokens(prefill_tokens) * 0.95 + prefill_tokens * 0.05
        self.version += 1

    def first_token(self, now: float, request_id: str) -> None:
        """Prefill is over: its tokens leave the load, its blocks enter it. Counts once."""
        booking = self._bookings.get(request_id)
        if booking is None or not booking.prefilling:
            return
        self._end_prefill(booking)
        self.rates.prefill_done(now, booking.slot, booking.prefill_tokens)
        self.decode_blocks[booking.slot] += booking.decode_blocks
        self.version += 1

    def settle(self, now: float, request_id: str) -> bool:
        """The request left the worker, for whatever reason. False when nothing was booked (any more)."""
        booking = self._bookings.pop(request_id, None)
        if booking is None:
            return False
        slot = booking.slot
        if booking.prefilling:
            self._end_prefill(booking)
            self.rates.prefill_abandoned(now, slot)
        else:
            self.decode_blocks[slot] -= booking.decode_blocks
        self.active_requests[slot] -= 1
        self.version += 1
        assert self.active_requests[slot] >= 0 and self.decode_blocks[slot] >= 0, f"slot {slot} fell below zero"
        return True

    def report(self, slot: int, *, running: int | None, waiting: int | None, kv_usage_ratio: float | None) -> None:
        """The worker's own gauges, as of now. Without both request gauges nothing is known of foreign load."""
        self.reported[slot] = (running, waiting, kv_usage_ratio)
        if running is not None and waiting is not None:
            self.foreign_requests[slot] = max(0, running + waiting - int(self.active_requests[slot]))
            self.version += 1

    def mean_prefill_tokens(self, otherwise: int) -> float:
        """What a request we did not book is likely to need: the recent mean of ours, else `otherwise`."""
        return self._mean_prefill_tokens if self._mean_prefill_tokens is not None else float(otherwise)

    def _placed(self, now: float, slot: int, tokens: int) -> None:
        """Newer work weighs more: growing the new summand is the same as letting all old ones decay."""
        if now - self._weigh_from > _RECENT_RESCALE_S:
            self.recent_tokens *= 2.0 ** ((self._weigh_from - now) / _RECENT_HALF_LIFE_S)
            self._weigh_from = now
        self.recent_tokens[slot] += tokens * 2.0 ** ((now - self._weigh_from) / _RECENT_HALF_LIFE_S)

    def _end_prefill(self, booking: Booking) -> None:
        booking.prefilling = False
        self.queued_requests[booking.slot] -= 1
        self.prefill_tokens[booking.slot] -= booking.prefill_tokens
        assert self.queued_requests[booking.slot] >= 0 and self.prefill_tokens[booking.slot] >= 0

    def _clear(self, slot: int) -> None:
        self.table[:, slot] = 0
        self.recent_tokens[slot] = 0.0
        self.reported.pop(slot, None)
        self.version += 1

    def check(self) -> None:
        """Assert that every array is the sum of the bookings."""
        for slot in range(len(self.active_requests)):
            mine = [b for b in self._bookings.values() if b.slot == slot]
            assert self.active_requests[slot] == len(mine)
            assert self.queued_requests[slot] == sum(b.prefilling for b in mine)
            assert self.prefill_tokens[slot] == sum(b.prefill_tokens for b in mine if b.prefilling)
            assert self.decode_blocks[slot] == sum(b.decode_blocks for b in mine if not b.prefilling)
            assert self.foreign_requests[slot] >= 0
