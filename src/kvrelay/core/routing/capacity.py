"""How full is a worker? Requests are not alike: one may prefill 30,000 tokens, another hold long answers in memory.

    used = active requests + prefill_weight x booked prefill tokens / 1000 + decode_weight x booked decode blocks / 1000

A worker is full when that reaches its `max_active_requests`. With both weights 0, requests are counted. A worker that
is idle takes any request, however heavy.
"""

from __future__ import annotations

from msgspec import Struct

from kvrelay.core.load.ledger import ACTIVE, DECODE, PREFILL, SlotLoad
from kvrelay.core.model.arrays import Floats

_PER = 1000.0


class Capacity(Struct, frozen=True):
    """What a thousand prefill tokens and a thousand decode blocks count, in requests."""

    prefill_weight: float = 0.0
    decode_weight: float = 0.0

    def used(self, load: SlotLoad) -> float:
        """Of one slot, whoever causes it."""
        active, _, prefill_tokens, decode_blocks, _ = load.kinds()
        return active + (self.prefill_weight * prefill_tokens + self.decode_weight * decode_blocks) / _PER

    def used_of_all(self, table: Floats) -> Floats:
        """The same from `Ledger.table`, for every slot."""
        if not (self.prefill_weight or self.decode_weight):
            counted: Floats = table[ACTIVE]
            return counted
        used: Floats = (
            table[ACTIVE] + (self.prefill_weight * table[PREFILL] + self.decode_weight * table[DECODE]) / _PER
        )
        return used
