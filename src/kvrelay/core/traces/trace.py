"""A trace: sessions of turns whose prompts are known by block ids only. There is no prompt text anywhere.

Rows are cumulative: a turn's `block_ids` cover its whole context, in order. Two turns share a prefix exactly as far as
their ids agree *within one scope*: the same id in two scopes names two different contents.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

# A session (or a trace with its sub-agents) has its own ids, or one numbering serves the whole file, or there are none.
SESSION_SCOPE, GLOBAL_SCOPE, NO_SCOPE = "session", "global", "none"
NO_BLOCKS = 0  # the block size of a trace without block ids: lengths and times only


class TraceError(Exception):
    """The file is not a trace that we can read: which line, what was found, what would have been right."""

    def __init__(self, line: int, found: str, legal: str) -> None:
        super().__init__(f"line {line}: {found}; {legal}")
        self.line = line
        self.found = found
        self.legal = legal


class NotTold(TraceError):
    """The file can be read in more than one way, and guessing could make up or hide reuse. `option` decides."""

    def __init__(self, line: int, found: str, legal: str, *, option: str) -> None:
        super().__init__(line, found, legal)
        self.option = option


class Turn(Struct, frozen=True):
    """One request. `due_ms` counts from the start of its session.

    `block_ids` are the full blocks of the context, in some formats with the partial last one; tokens that no block
    covers are this turn's own.
    """

    due_ms: float
    think_ms: float  # least pause after the end of the session's previous turn
    block_ids: tuple[int, ...]
    input_tokens: int
    output_tokens: int


class Session(Struct, frozen=True):
    """Turns in their order; the next one may only start when the one before it has ended."""

    session_id: str
    scope: str
    turns: tuple[Turn, ...]
    start_ms: float = 0.0  # on the trace's clock
    parent_id: str | None = None  # the session that started this one as its sub-agent


class Trace(Struct, frozen=True):
    """Sessions in file order, all on one clock that starts with the first request."""

    block_size_tokens: int  # NO_BLOCKS where no row has ids
    hash_scope: str
    sessions: tuple[Session, ...]
    notices: tuple[str, ...] = ()  # what the importer had to do to the file
    label: str = ""  # what results on it must be called, if not simply the file's name

    @property
    def requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)

    @property
    def input_tokens(self) -> int:
        return sum(turn.input_tokens for session in self.sessions for turn in session.turns)

    def limitations(self) -> tuple[str, ...]:
        """What results on this trace cannot show."""
        if self.hash_scope == SESSION_SCOPE:
            return (
                "Block ids of this trace are local to a session and its sub-agents: a system prompt or tool list that "
                "several sessions share cannot be seen, so reuse across sessions is understated.",
            )
        if self.hash_scope == NO_SCOPE:
            return ("This trace has no block ids: lengths and times only. What its prompts shared is not known.",)
        return ()


class Arrival(Struct, frozen=True):
    """One request of a trace, in the order in which they were made."""

    at_ms: float
    session: Session
    turn: Turn


def arrivals(trace: Trace) -> list[Arrival]:
    """By time; of equal times the earlier session (and turn) of the file first."""
    flat = [Arrival(s.start_ms + turn.due_ms, s, turn) for s in trace.sessions for turn in s.turns]
    return sorted(flat, key=lambda arrival: arrival.at_ms)


def root_of(session_id: str, parents: Mapping[str, str | None]) -> str:
    """The session at the top of a family of sub-agents; a parent that is not in `parents` any more counts, too."""
    name, parent = session_id, parents.get(session_id)
    while parent is not None and parent != session_id:
        name, parent = parent, parents.get(parent)
    return name
