"""Small, middle, large: how much of a tier is enough. A larger one has to recompute less *and* be waited for less.

Computed from a hit curve, for a tier behind a near one (exclusive, together one LRU list). Everything that is not hit
is computed and written to the tier; what the tier hits is read from it, unless computing is quicker: then nothing is.

    waiting   computed tokens / prefill rate + read bytes / bandwidth + requests x latency
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from kvrelay.core.sizing.breakeven import Link, Prefill
from kvrelay.core.sizing.curve import HitCurve

LEAST_SHARE = 0.01
"""Of all prompt tokens, and of the waiting: what a larger tier has to save at least."""


class SweepRow(Struct, frozen=True, kw_only=True):
    """One size. Tokens over the whole trace; `recomputed_tokens` were seen before and computed again."""

    capacity_bytes: float
    tier_hit_tokens: float  # that the near tier has not got
    recomputed_tokens: float
    read_bytes: float
    written_bytes: float
    waiting_s: float  # modelled, over all prompts


class Advice(Struct, frozen=True):
    """`recommended_bytes` is one of the sizes, or 0: none of them is worth it. `why` has one line per size."""

    recommended_bytes: float
    why: tuple[str, ...]
    rows: tuple[SweepRow, ...]


def sweep(
    curve: HitCurve,
    capacities_bytes: Sequence[float],
    *,
    near_bytes: float,
    bytes_per_token: float,
    requests: int,
    link: Link,
    prefill: Prefill,
) -> Advice:
    """Sizes in any order; each once."""
    block_bytes = curve.block_size_tokens * bytes_per_token
    near_hits = curve.hits_at(near_bytes / block_bytes)

    def row(capacity_bytes: float) -> SweepRow:
        hits = curve.hits_at((near_bytes + capacity_bytes) / block_bytes)
        gained = hits - near_hits
        pays = bytes_per_token / link.bytes_per_s < 1 / prefill.tokens_per_s
        used = gained if pays else 0.0
        computed = curve.input_tokens - near_hits - used
        latency_s = requests * link.latency_s if used else 0.0
        return SweepRow(
            capacity_bytes=capacity_bytes,
            tier_hit_tokens=gained,
            recomputed_tokens=curve.most_hits - near_hits - used,
            read_bytes=used * bytes_per_token,
            written_bytes=computed * bytes_per_token if capacity_bytes else 0.0,
            waiting_s=computed / prefill.tokens_per_s + used * bytes_per_token / link.bytes_per_s + latency_s,
        )

    rows = tuple(row(size) for size in sorted({0.0, *capacities_bytes}))
    return _advise(rows, curve.input_tokens)


def _advise(rows: Sequence[SweepRow], input_tokens: int) -> Advice:
    """Each size against the best of the smaller ones; a step that saves too little does not hide one that would."""
    best, why = rows[0], []
    for larger in rows[1:]:
        smaller = best
        saved_share = (smaller.recomputed_tokens - larger.recomputed_tokens) / input_tokens if input_tokens else 0.0
        waiting_share = 1 - larger.waiting_s / smaller.waiting_s if smaller.waiting_s else 0.0
        said = (
            f"{_gb(larger.capacity_bytes)} instead of {_gb(smaller.capacity_bytes)}: recomputed tokens "
            f"{smaller.recomputed_tokens:,.0f} -> {larger.recomputed_tokens:,.0f} ({saved_share:.1%} of all prompt "
            f"tokens), waiting {smaller.waiting_s:,.1f} -> {larger.waiting_s:,.1f} s ({waiting_share:.1%} less)"
        )
        if saved_share < LEAST_SHARE or waiting_share < LEAST_SHARE:
            moved = larger.read_bytes + larger.written_bytes
            why.append(f"{said}: not worth it, {_gb(moved)} would be moved for that")
            continue
        why.append(f"{said}: worth it")
        best = larger
    return Advice(best.capacity_bytes, tuple(why), tuple(rows[1:]))


def _gb(amount_bytes: float) -> str:
    return "nothing" if not amount_bytes else f"{amount_bytes / 1e9:,.3g} GB"
