"""How one API writes what the engine makes: the one thing in which the families of generating paths differ."""

from __future__ import annotations

from typing import Any, Protocol

from kvrelay.core.engine.engine import Finished


class Choice:
    """One sample: what the engine has made of it so far."""

    __slots__ = ("finished", "index", "max_tokens", "prompt_index", "token_ids")

    def __init__(self, *, index: int, prompt_index: int, max_tokens: int) -> None:
        self.index = index
        self.prompt_index = prompt_index
        self.max_tokens = max_tokens
        self.token_ids: list[int] = []
        self.finished: Finished | None = None


class Dialect(Protocol):
    """One per reply. Bytes are whole server-sent events; empty ones are not sent."""

    def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed, when every choice has ended; `kvrelay_mock` is added to it."""
        ...

    def opening(self) -> bytes:
        """What leaves together with the head of a stream."""
        ...

    def first(self, choice: Choice) -> bytes:
        """What precedes the first token of a choice. Faults do not count it as a chunk."""
        ...

    def token(self, choice: Choice, finished: Finished | None) -> bytes:
        """The token made last; with `finished`, how the choice ended as well."""
        ...

    def closing(self) -> bytes:
        """The end of a stream."""
        ...
