"""What stands between clients and mock workers in a drill: our gateway, or a router of another make.

None is the answer of a front that cannot be asked; what it cannot be told raises CannotDo.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from kvrelay.core.receipts.receipt import Receipt
from kvrelay.lab.drills.actions import Action
from kvrelay.lab.drills.drill import Setup
from kvrelay.lab.drills.fleets.processes import Process, Processes
from kvrelay.lab.drills.history import View
from kvrelay.lab.drills.prompts import Text


class Front(Protocol):
    """Valid from `start` to `stop`, which ends it in whatever state it is."""

    name: str
    takes_token_ids: bool  # else prompts are sent as text

    @property
    def url(self) -> str: ...

    async def start(self, setup: Setup, processes: Processes, folder: Path) -> None:
        """Returns when it uses all workers."""
        ...

    async def stop(self) -> None: ...

    async def restart(self) -> None:
        """Its process is killed and another started; returns when that listens."""
        ...

    async def pause(self, seconds: float) -> None: ...

    async def do(self, action: Action) -> None:
        """An action that needs nothing but the front. Raises CannotDo."""
        ...

    async def add(self, name: str, process: Process) -> None: ...

    async def remove(self, name: str) -> None: ...

    async def uses(self, lives: Mapping[str, str]) -> bool | None:
        """Whether requests would be sent to these workers, in these lives."""
        ...

    async def view(self, label: str, at_s: float) -> View: ...

    async def claims(self, text: Text) -> dict[str, int] | None:
        """Tokens of the text that it believes each worker to hold."""
        ...

    async def salt(self) -> str | None:
        """The cache salt that it puts into requests."""
        ...

    async def receipts(self) -> list[Receipt] | None: ...

    async def receipts_dropped(self) -> int | None: ...
