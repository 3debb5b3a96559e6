"""Ids that are local to sessions, numbered for a whole file."""

from __future__ import annotations

from kvrelay.core.traces.trace import SESSION_SCOPE, Trace, arrivals


def global_ids(trace: Trace) -> tuple[dict[tuple[str, int], int], list[str]]:
    """(scope, id) -> id, and what there is to say about it. Global ids keep their numbers."""
    numbers: dict[tuple[str, int], int] = {}
    local = trace.hash_scope == SESSION_SCOPE
    for arrival in arrivals(trace):
        scope = arrival.session.scope
        for block in arrival.turn.block_ids:
            numbers.setdefault((scope, block), len(numbers) if local else block)
    said = f"{len(numbers)} ids that were local to their sessions are numbered for the whole file."
    return numbers, [said] if local else []
