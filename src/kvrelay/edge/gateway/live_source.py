"""One gateway as the source of the live page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvrelay.edge.observe.readings import Readings
from kvrelay.edge.system.clock import monotonic_s

if TYPE_CHECKING:
    from kvrelay.edge.gateway.gateway import Gateway

Json = Any


class GatewaySource:
    """`status` and `workers` are the values that the admin API answers."""

    def __init__(self, gateway: Gateway, status: Callable[[], Json], workers: Callable[[], Json]) -> None:
        self._gateway = gateway
        self._status = status
        self._workers = workers

    async def readings(self) -> Readings:
        return Readings(self._gateway.metrics.collect(), monotonic_s())

    async def status(self) -> Mapping[str, Json]:
        value: Mapping[str, Json] = msgspec.to_builtins(self._status())
        return value

    async def workers(self) -> Sequence[Mapping[str, Json]]:
        value: Sequence[Mapping[str, Json]] = self._workers()["workers"]
        return value

    async def receipts(self, limit: int) -> Sequence[Mapping[str, Json]]:
        return [msgspec.json.decode(line) for line in self._gateway.receipts.recent_lines(limit)]

    async def receipt(self, request_id: str) -> Mapping[str, Json] | None:
        receipt = self._gateway.receipts.get(request_id)
        return None if receipt is None else msgspec.to_builtins(receipt)

    def results_folder(self) -> Path | None:
        return self._gateway.config.observe.results
