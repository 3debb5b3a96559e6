"""What the processes of one gateway tell each other. Workers go by name: each process knows their lives for itself."""

from __future__ import annotations

from msgspec import Struct

from kvrelay.core.model.ids import SessionKey


class Placement(Struct, frozen=True):
    """A session has its worker here from `at` on (seconds of the machine's monotonic clock); or no longer has it.

    Of two placements of one session the later one holds, everywhere.
    """

    session: SessionKey
    worker: str
    rank: int
    at: float
    released: bool = False


class SiblingLoad(Struct, frozen=True):
    """What one process has booked on one rank of a worker right now."""

    worker: str
    rank: int
    active_requests: int
    queued_requests: int
    active_prefill_tokens: int
    active_decode_blocks: int
    prefilled_tokens: int  # finished there since the process began; only differences mean anything
