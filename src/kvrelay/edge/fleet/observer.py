"""Who counts what the fleet sees. `Metrics` does; tests and simulations may leave it out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class FleetObserver(Protocol):
    def count_events(self, worker: str, kinds: Mapping[str, int]) -> None: ...

    def count_malformed(self, worker: str) -> None: ...

    def count_unknown_topic(self, endpoint: str) -> None: ...

    def forget_worker(self, worker: str) -> None: ...


class NoObserver:
    """Counts nothing."""

    def count_events(self, worker: str, kinds: Mapping[str, int]) -> None:
        return

    def count_malformed(self, worker: str) -> None:
        return

    def count_unknown_topic(self, endpoint: str) -> None:
        return

    def forget_worker(self, worker: str) -> None:
        return
