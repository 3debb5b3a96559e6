"""All processes of a group, merged, as the source of the live page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from kvrelay.edge.group import merge
from kvrelay.edge.group.member import NoAnswer
from kvrelay.edge.observe.readings import Readings
from kvrelay.edge.system.clock import monotonic_s

if TYPE_CHECKING:
    from kvrelay.edge.group.group import Group

Json = Any


class GroupSource:
    """Every question raises NoAnswer while no process is there to ask."""

    def __init__(self, group: Group) -> None:
        self._group = group

    async def readings(self) -> Readings:
        await self._group.read_pages()
        return Readings(self._group.pages.collect(), monotonic_s())

    async def status(self) -> Mapping[str, Json]:
        status = merge.merged_status(await self._ask("/admin/status"))
        status["gateway"] = {**status["gateway"], **self._group.describe()}
        return {**status, "processes": self._group.describe_processes({})}

    async def workers(self) -> Sequence[Mapping[str, Json]]:
        value: Sequence[Mapping[str, Json]] = merge.merged_workers(await self._ask("/admin/workers"))["workers"]
        return value

    async def receipts(self, limit: int) -> Sequence[Mapping[str, Json]]:
        parts = await self._ask(f"/admin/receipts?limit={limit}")
        value: Sequence[Mapping[str, Json]] = merge.merged_receipts(parts, limit)["receipts"]
        return value

    async def receipt(self, request_id: str) -> Mapping[str, Json] | None:
        answers = await self._group.ask_all("GET", f"/admin/receipts/{quote(request_id, safe='')}")
        found: Mapping[str, Json] | None = merge.newest_receipt(
            json.loads(answer.body) for answer in answers.values() if answer.ok
        )
        return found

    def results_folder(self) -> Path | None:
        return self._group.config.observe.results

    async def _ask(self, path: str) -> list[Json]:
        answers = await self._group.ask_all("GET", path)
        good = [json.loads(answer.body) for answer in answers.values() if answer.ok]
        if not good:
            raise NoAnswer("all of them are starting or gone")
        return good
