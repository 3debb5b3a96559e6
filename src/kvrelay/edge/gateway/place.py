"""Where a gateway stands when it is one process of several that share a port."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from kvrelay.core.model.effects import ShareSession
from kvrelay.core.routing.epochs import EpochState
from kvrelay.edge.observe.receipt_log import LineWriter
from kvrelay.edge.system.config import WorkerConfig


class Place(Struct, frozen=True):
    """All that a process of a group is given beside the configuration. Holds a secret: never log it.

    `workers`, `policy`, `scorer` and `drained` are how things stand, which an operator may have changed since the
    configuration was read.
    """

    process: int
    port: int  # of the data port, bound by all processes
    admin_socket: Path  # instead of the admin port
    fingerprint_secret: bytes  # the same in all processes
    receipts: LineWriter | None
    share: Callable[[ShareSession], None]
    workers: tuple[WorkerConfig, ...]
    policy: str | None
    scorer: str | None
    drained: tuple[str, ...]
    epochs: EpochState
    settle_s: float  # how long to wait for the workers' first answers before requests are accepted
