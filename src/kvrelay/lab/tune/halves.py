"""Two halves of a trace: weights are chosen on one and confirmed on the other, which they have never seen."""

from __future__ import annotations

import hashlib

import msgspec

from kvrelay.core.traces.trace import Session, Trace, TraceError


def halves(trace: Trace, *, seed: int) -> tuple[Trace, Trace]:
    """Training and held-out half: whole sessions with their sub-agents, drawn by name.

    The draw orders the sessions and cuts in the middle, so that the halves differ by one session at most. Raises
    TraceError for a trace of one session.
    """
    roots = sorted({_root(session) for session in trace.sessions}, key=lambda name: _draw(seed, name))
    if len(roots) < 2:
        raise TraceError(1, "one session", "two or more: one half to choose the weights, one to confirm them")
    training = set(roots[: (len(roots) + 1) // 2])
    return _only(trace, training), _only(trace, set(roots) - training)


def _only(trace: Trace, roots: set[str]) -> Trace:
    kept = tuple(session for session in trace.sessions if _root(session) in roots)
    return msgspec.structs.replace(trace, sessions=kept)


def _root(session: Session) -> str:
    return session.parent_id or session.session_id


def _draw(seed: int, name: str) -> bytes:
    return hashlib.blake2b(f"halves\0{seed}\0{name}".encode(), digest_size=8).digest()
