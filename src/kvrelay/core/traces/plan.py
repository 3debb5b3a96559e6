"""The plan of a replay: what is sent, when at the earliest, after what. Policies never see or change it."""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np
from msgspec import Struct

from kvrelay.core.model.prompt import TokenIds
from kvrelay.core.traces.synth import PromptSynth
from kvrelay.core.traces.trace import Session, Trace


class Scale(Struct, frozen=True):
    """How a trace is shrunk to what mock workers can show in seconds. Written into label, manifest and report."""

    block_tokens: int  # tokens that stand for one block of the trace
    time_divisor: float = 1.0
    session_gap_ms: float | None = None  # None: the trace's own starts / time_divisor; else session k starts at k x gap
    max_gap_ms: float | None = None  # longest pause between two turns of a session, after division
    max_output_tokens: int | None = None


class PlannedTurn(Struct, frozen=True, eq=False):
    """Due at `due_ms` of the replay, but never before the session's previous turn ended and `think_ms` passed."""

    due_ms: float
    think_ms: float
    token_ids: TokenIds
    max_tokens: int


class PlannedSession(Struct, frozen=True, eq=False):
    session_id: str
    turns: tuple[PlannedTurn, ...]


class Plan(Struct, frozen=True, eq=False):
    """The same for every arm; `digest` proves it."""

    sessions: tuple[PlannedSession, ...]
    seed: int

    @property
    def requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)

    @property
    def prompt_tokens(self) -> int:
        return sum(turn.token_ids.size for session in self.sessions for turn in session.turns)

    def digest(self) -> str:
        """Over every session name, time and token, in order."""
        summed = hashlib.sha256()
        for session in self.sessions:
            summed.update(session.session_id.encode())
            for turn in session.turns:
                summed.update(msgspec.json.encode((turn.due_ms, turn.think_ms, turn.max_tokens)))
                summed.update(np.ascontiguousarray(turn.token_ids, dtype="<u4").tobytes())
        return summed.hexdigest()


def make_plan(trace: Trace, scale: Scale, *, seed: int) -> Plan:
    synth = PromptSynth.of(trace, seed=seed, block_tokens=scale.block_tokens)
    starts = _starts_ms(trace, scale)
    sessions = tuple(_session(trace, session, starts[session.session_id], scale, synth) for session in trace.sessions)
    return Plan(sessions, seed)


def _starts_ms(trace: Trace, scale: Scale) -> dict[str, float]:
    """A sub-agent starts where its parent was at that time in the trace; the others start as the scale says."""
    starts: dict[str, float] = {}
    roots = [session for session in trace.sessions if session.parent_id is None]
    by_name = {session.session_id: session for session in roots}
    first = min((session.start_ms for session in trace.sessions), default=0.0)
    for number, session in enumerate(roots):
        own = (session.start_ms - first) / scale.time_divisor
        starts[session.session_id] = own if scale.session_gap_ms is None else number * scale.session_gap_ms
    for session in trace.sessions:
        if session.session_id in starts:
            continue
        parent = by_name.get(session.parent_id or "")
        if parent is None:  # the cut left its parent out
            starts[session.session_id] = (session.start_ms - first) / scale.time_divisor
        else:
            offset = _replay_time_ms(parent, session.start_ms - parent.start_ms, scale)
            starts[session.session_id] = starts[parent.session_id] + offset
    return starts


def _replay_time_ms(session: Session, time_ms: float, scale: Scale) -> float:
    """Where `time_ms` of the session lies in the replay, whose pauses are divided and capped."""
    replayed, before = 0.0, 0.0
    for turn in session.turns:
        if turn.due_ms >= time_ms:
            break
        replayed += _gap_ms(turn.due_ms - before, scale)
        before = turn.due_ms
    return replayed + _gap_ms(time_ms - before, scale)


def _session(trace: Trace, session: Session, start_ms: float, scale: Scale, synth: PromptSynth) -> PlannedSession:
    turns, due_ms, before_ms = [], start_ms, 0.0
    for index, turn in enumerate(session.turns):
        due_ms += _gap_ms(turn.due_ms - before_ms, scale)
        before_ms = turn.due_ms
        turns.append(
            PlannedTurn(
                due_ms=round(due_ms, 3),
                think_ms=round(_gap_ms(turn.think_ms, scale), 3),
                token_ids=synth.prompt(trace, session, index),
                max_tokens=max(1, int(_capped(turn.output_tokens, scale.max_output_tokens))),
            )
        )
    return PlannedSession(session.session_id, tuple(turns))


def _gap_ms(gap_ms: float, scale: Scale) -> float:
    return _capped(max(0.0, gap_ms) / scale.time_divisor, scale.max_gap_ms)


def _capped(value: float, most: float | None) -> float:
    return value if most is None else min(value, most)
