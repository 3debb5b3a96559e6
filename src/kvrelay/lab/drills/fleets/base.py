"""What every kind of fleet offers to whoever runs a drill on it."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from kvrelay.lab.drills.actions import Action
from kvrelay.lab.drills.drill import Look, Send, Settle
from kvrelay.lab.drills.history import History


class CannotDo(Exception):
    """This kind of fleet has no such thing to break, or must not be broken that way; the drill's result is unknown."""


class Fleet(Protocol):
    """Valid inside its `async with`; all that happens is written into `history`."""

    kind: str
    history: History

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None: ...

    async def send(self, number: int, step: Send) -> None:
        """Every turn at its time, every blow at its; returns when all turns have ended."""
        ...

    async def do(self, action: Action) -> None:
        """Raises CannotDo."""
        ...

    async def wait(self, seconds: float) -> None: ...

    async def settle(self, step: Settle) -> None: ...

    async def look(self, step: Look) -> None: ...
