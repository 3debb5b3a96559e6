"""What a group gives one of its processes on standard input, as JSON: all that it needs to begin."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from kvrelay.core.routing.epochs import EpochState
from kvrelay.edge.fleet.change import fleet_change
from kvrelay.edge.system.config import Config, WorkerConfig


class Orders(Struct, frozen=True):
    """Holds secrets: they go through a pipe, never through arguments or the environment."""

    process: int
    port: int
    hub_socket: str
    admin_socket: str
    config: dict[str, Any]
    workers: list[dict[str, Any]]
    policy: str | None
    scorer: str | None
    drained: list[str]
    epochs: EpochState
    seed: int
    key_seed: bytes
    fingerprint_secret: bytes
    settle_s: float


def read_orders(text: bytes) -> Orders:
    return msgspec.json.decode(text, type=Orders)


class Standing:
    """How things are meant to be: the configuration, and what was changed on the admin port since it was read.

    Whichever process begins anew begins from here, so a change that one of them missed is not lost.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.workers = {worker.name: worker for worker in config.workers}
        self.policy: str | None = None  # None: as configured
        self.scorer: str | None = None
        self.drained: dict[str, None] = {}
        self.epochs = EpochState()

    def add_worker(self, worker: WorkerConfig) -> None:
        self.workers[worker.name] = worker

    def remove_worker(self, name: str) -> None:
        self.workers.pop(name, None)
        self.drained.pop(name, None)

    def drain(self, name: str) -> None:
        self.drained[name] = None

    def resume(self, name: str) -> None:
        self.drained.pop(name, None)

    def switch_policy(self, policy: str, scorer: str | None) -> None:
        self.policy, self.scorer = policy, scorer or self.scorer

    def workers_under(self, config: Config) -> dict[str, WorkerConfig]:
        """The workers after a change to `config`. Raises WorkerClash."""
        change = fleet_change(self.config.workers, config.workers, self.workers)
        return {worker.name: worker for worker in (*change.kept, *change.added)}

    def take(self, config: Config) -> None:
        """As every process does it: what the new configuration does not change stays. Raises WorkerClash."""
        self.workers = self.workers_under(config)
        self.drained = {name: None for name in self.drained if name in self.workers}
        old, new = self.config.gateway, config.gateway
        if (old.policy, old.scorer) != (new.policy, new.scorer):
            self.policy = self.scorer = None
        self.config = config
