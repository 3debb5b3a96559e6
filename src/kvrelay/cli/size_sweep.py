"""`kvrelay size --sweep`: which of a few sizes of a tier to take, and why not the next one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.cli import messages
from kvrelay.cli.messages import size as words

if TYPE_CHECKING:
    from kvrelay.core.sizing.breakeven import Link, Prefill
    from kvrelay.core.sizing.sweep import Advice
    from kvrelay.lab.report.paper import Section
    from kvrelay.lab.sizing.sizing import Sizing

AUTO = "auto"


def advise(asked: str, sizing: Sizing | None, near_gb: float, link: Link, rates: tuple[Prefill, ...]) -> Advice:
    """Against the fastest worker: what does not pay there does not pay."""
    from kvrelay.cli.simulate import _numbers
    from kvrelay.core.sizing.sweep import sweep

    if sizing is None:
        messages.fail(words.sweep_needs_a_trace())
    if asked == AUTO:
        sizes = _small_middle_large(sizing)
    else:
        sizes = tuple(gb * 1e9 for gb in _numbers("--sweep", asked, low=1e-6, high=1e9))
    return sweep(
        sizing.curve,
        sizes,
        near_bytes=near_gb * 1e9,
        bytes_per_token=sizing.bytes_per_token,
        requests=sizing.requests,
        link=link,
        prefill=max(rates, key=lambda rate: rate.tokens_per_s),
    )


def section(advice: Advice, link: Link, rates: tuple[Prefill, ...]) -> Section:
    from kvrelay.lab.report.paper import Section
    from kvrelay.lab.report.table import Table
    from kvrelay.lab.sizing.story import gb

    fastest = max(rates, key=lambda rate: rate.tokens_per_s)
    rows = tuple(
        (
            gb(row.capacity_bytes),
            f"{row.recomputed_tokens:,.0f}",
            gb(row.read_bytes),
            gb(row.written_bytes),
            f"{row.waiting_s:,.1f} s",
        )
        for row in advice.rows
    )
    chosen = tuple(row.capacity_bytes == advice.recommended_bytes for row in advice.rows)
    table = Table(("tier", "recomputed tokens", "read", "written", "waiting, modelled"), rows, chosen)
    text = f"{words.recommended(advice.recommended_bytes)} Over {link.name}, against {fastest.name}."
    return Section("Size of a tier", text, table=table, points=advice.why)


def _small_middle_large(sizing: Sizing) -> tuple[float, ...]:
    """A quarter of the knee, the knee, and all that is useful."""
    if sizing.knee is None:
        return (1e9,)
    knee = sizing.bytes_of(sizing.knee.capacity_blocks)
    return (knee / 4, knee, sizing.bytes_of(sizing.curve.largest_useful_blocks))
