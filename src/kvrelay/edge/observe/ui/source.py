"""What the live page is drawn from: one gateway, or several processes that look like one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from kvrelay.edge.observe.readings import Readings

Json = Any


class Source(Protocol):
    """Answers are JSON values, as the admin API gives them."""

    async def readings(self) -> Readings:
        """The metrics page."""
        ...

    async def status(self) -> Mapping[str, Json]:
        """As /admin/status."""
        ...

    async def workers(self) -> Sequence[Mapping[str, Json]]:
        """As /admin/workers."""
        ...

    async def receipts(self, limit: int) -> Sequence[Mapping[str, Json]]:
        """The last ones, newest first."""
        ...

    async def receipt(self, request_id: str) -> Mapping[str, Json] | None: ...

    def results_folder(self) -> Path | None: ...
