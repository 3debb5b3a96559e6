"""Sessions of a trace that has none: a request continues the one whose last full block it contains.

Every request of two or more full blocks leaves a claim on its last full block. A later request looks through its blocks
from the last down to the second; the first one with a claim says which session it continues, and takes the claim. The
very first block is not asked: it is the system prompt that everybody shares.
"""

from __future__ import annotations

from msgspec.structs import replace

from kvrelay.core.traces.trace import Session, Trace, Turn, arrivals


def derived_sessions(trace: Trace) -> list[int]:
    """A session's number for every request, in the order of arrival."""
    claims: dict[tuple[str, int], int] = {}
    numbers, sessions = [], 0
    for arrival in arrivals(trace):
        scope, turn = arrival.session.scope, arrival.turn
        claimed = next((block for block in reversed(turn.block_ids[1:]) if (scope, block) in claims), None)
        if claimed is None:
            number, sessions = sessions, sessions + 1
        else:
            number = claims.pop((scope, claimed))
        full = turn.input_tokens // trace.block_size_tokens if trace.block_size_tokens else 0
        if full >= 2:
            claims[scope, turn.block_ids[full - 1]] = number
        numbers.append(number)
    return numbers


def with_derived_sessions(trace: Trace) -> Trace:
    """The same requests at the same times, grouped. Requests of equal times may change places between sessions."""
    grouped: dict[int, list[tuple[float, str, Turn]]] = {}
    for number, arrival in zip(derived_sessions(trace), arrivals(trace), strict=True):
        grouped.setdefault(number, []).append((arrival.at_ms, arrival.session.scope, arrival.turn))
    sessions = []
    for number, own in grouped.items():
        start_ms, scope, _ = own[0]
        turns = tuple(replace(turn, due_ms=round(at_ms - start_ms, 4)) for at_ms, _, turn in own)
        sessions.append(Session(f"derived-{number}", scope, turns, start_ms))
    notice = f"{len(sessions)} sessions are derived from shared blocks; the file itself has none."
    return replace(trace, sessions=tuple(sessions), notices=(*trace.notices, notice))
