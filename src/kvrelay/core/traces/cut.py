"""Cutting a trace down without bending it: whole sessions in their order, or the head of a session, never a hole.

What is left out is counted with its reason, so that retained and excluded always add up to what came in.
"""

from __future__ import annotations

import hashlib
from math import ceil

from msgspec import Struct
from msgspec.structs import replace

from kvrelay.core.traces.trace import Session, Trace, root_of

FILTERED_LABEL = "filtered synthetic subset"
"""What a trace is called from which anything was left out: its figures are not those of the original load."""


class CutRule(Struct, frozen=True):
    """Limits, each optional. They are applied in the order of the members."""

    max_context_tokens: int | None = None  # input + output of one turn, in the trace's own tokens
    max_turns_per_session: int | None = None
    min_turns_per_session: int = 1
    max_sessions: int | None = None
    sample_seed: int | None = None  # None: the first sessions of the file; else a reproducible draw
    max_requests: int | None = None
    sample_share: float | None = None  # of all sessions, drawn by the seed (0 without one); before `max_sessions`


class CutCounts(Struct, frozen=True):
    """Requests by what became of them."""

    received: int
    retained: int
    over_long: int = 0  # the turn does not fit the model
    after_over_long: int = 0  # its context contains a turn that was left out
    beyond_turn_limit: int = 0
    session_too_short: int = 0
    session_not_sampled: int = 0
    beyond_request_limit: int = 0

    @property
    def excluded(self) -> int:
        return self.received - self.retained


class Cut(Struct, frozen=True):
    trace: Trace
    counts: CutCounts


def cut(trace: Trace, rule: CutRule) -> Cut:
    """Apply `rule`; the order of sessions and turns is kept."""
    lost = dict.fromkeys(CutCounts.__struct_fields__, 0)
    sessions = [_shorten(session, rule, lost) for session in trace.sessions]
    sessions = _drop(sessions, [s for s in sessions if len(s.turns) >= max(1, rule.min_turns_per_session)], lost)
    chosen = _sample(sessions, rule)
    lost["session_not_sampled"] = _requests(sessions) - _requests(chosen)
    kept = _limit(chosen, rule.max_requests)
    lost["beyond_request_limit"] = _requests(chosen) - _requests(kept)
    lost["received"], lost["retained"] = trace.requests, _requests(kept)
    counts = CutCounts(**lost)
    left_out = sum(lost.values()) - counts.received - counts.retained
    assert left_out == counts.excluded, (left_out, counts)
    return Cut(replace(trace, sessions=tuple(kept), label=_label(trace, counts)), counts)


def _label(trace: Trace, counts: CutCounts) -> str:
    if not counts.excluded or FILTERED_LABEL in trace.label:
        return trace.label
    return f"{trace.label}, {FILTERED_LABEL}" if trace.label else FILTERED_LABEL


def _shorten(session: Session, rule: CutRule, lost: dict[str, int]) -> Session:
    turns = session.turns
    if rule.max_context_tokens is not None:
        fits = 0
        while fits < len(turns) and turns[fits].input_tokens + turns[fits].output_tokens <= rule.max_context_tokens:
            fits += 1
        if fits < len(turns):
            lost["over_long"] += 1
            lost["after_over_long"] += len(turns) - fits - 1
        turns = turns[:fits]
    if rule.max_turns_per_session is not None:
        lost["beyond_turn_limit"] += max(0, len(turns) - rule.max_turns_per_session)
        turns = turns[: rule.max_turns_per_session]
    return Session(session.session_id, session.scope, turns, session.start_ms, session.parent_id)


def _drop(before: list[Session], after: list[Session], lost: dict[str, int]) -> list[Session]:
    lost["session_too_short"] = _requests(before) - _requests(after)
    return after


def _sample(sessions: list[Session], rule: CutRule) -> list[Session]:
    if rule.sample_share is not None:
        sessions = _share(sessions, rule.sample_share, rule.sample_seed or 0)
    if rule.max_sessions is None or rule.max_sessions >= len(sessions):
        return sessions
    if rule.sample_seed is None:
        return sessions[: rule.max_sessions]
    drawn = sorted(sessions, key=lambda session: _draw(rule.sample_seed, session.session_id))[: rule.max_sessions]
    names = {session.session_id for session in drawn}
    return [session for session in sessions if session.session_id in names]


def _share(sessions: list[Session], share: float, seed: int) -> list[Session]:
    """Whole families: who started whom stays together, as sub-agents read what their parents had computed."""
    parents = {session.session_id: session.parent_id for session in sessions}
    roots = {name: root_of(name, parents) for name in parents}
    families = list(dict.fromkeys(roots.values()))
    drawn = set(sorted(families, key=lambda family: _draw(seed, family))[: ceil(len(families) * share)])
    return [session for session in sessions if roots[session.session_id] in drawn]


def _draw(seed: int | None, name: str) -> bytes:
    return hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()


def _limit(sessions: list[Session], max_requests: int | None) -> list[Session]:
    """Whole sessions as long as they fit, then the head of the one that crosses the limit."""
    if max_requests is None:
        return sessions
    kept: list[Session] = []
    for session in sessions:
        room = max_requests - _requests(kept)
        if room <= 0:
            break
        turns = session.turns[:room]
        kept.append(Session(session.session_id, session.scope, turns, session.start_ms, session.parent_id))
    return kept


def _requests(sessions: list[Session]) -> int:
    return sum(len(session.turns) for session in sessions)
