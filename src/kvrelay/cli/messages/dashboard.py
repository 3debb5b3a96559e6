"""What `kvrelay dashboard` says."""

from __future__ import annotations

from kvrelay.core.gates.gate_file import Limit, PairedLimit


def looking(url: str, seconds: float) -> str:
    return f"taking the baseline from {url} for {seconds:g} s"


def limit(one: Limit | PairedLimit) -> str:
    if isinstance(one, PairedLimit):
        return f"`{one.paired}` of paired requests ({one.over}) at most {one.value:g} times that of the baseline"
    side = "at most" if one.at_most else "at least"
    against = f" times that of {one.relative_to or 'the baseline'}" if one.ratio else ""
    return f"`{one.metric}` {side} {one.value:g}{against}"
