"""What a cache costs and what it saves, where somebody states prices. No price is built in."""

from __future__ import annotations

from msgspec import Struct

HOURS_PER_MONTH = 730.0


class Prices(Struct, frozen=True):
    """In one currency, whichever."""

    gb_month: float  # of the tier
    million_prefill_tokens: float  # what computing them costs


class CostRow(Struct, frozen=True):
    """Per hour of the trace's own time. `net` is what remains of the savings."""

    capacity_bytes: float
    cost_per_hour: float
    saved_per_hour: float

    @property
    def net_per_hour(self) -> float:
        return self.saved_per_hour - self.cost_per_hour


def cost_row(capacity_bytes: float, hit_tokens: float, *, span_s: float, prices: Prices) -> CostRow | None:
    """None for a trace without a duration: nothing is per hour then."""
    if span_s <= 0:
        return None
    hours = span_s / 3600
    return CostRow(
        capacity_bytes,
        capacity_bytes / 1e9 * prices.gb_month / HOURS_PER_MONTH,
        hit_tokens / 1e6 * prices.million_prefill_tokens / hours,
    )
