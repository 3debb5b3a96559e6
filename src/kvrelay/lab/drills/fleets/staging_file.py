"""The file that describes a fleet of somebody else, and what it must say before anything of it is struck.

staging = true
namespace = "staging-a"          # shown in the evidence
model = "tiny"

[[workers]]
url = "http://127.0.0.1:8100"
pid = 4711                        # leader of its process group; or uid = "..." for one that cannot be signalled
start = "bash start-a.sh"         # starts it again at the same address; its output is nobody's
events = "ipc:///tmp/events-a"
replay = "ipc:///tmp/replay-a"
adapter = "vllm"
revision = "v2"                   # of its weights, for drills with several; the others have none
kv_report = "http://127.0.0.1:7101"   # where its KV connector tells what it loaded

[store]                           # for drills of the shared tier: the drill itself is the store
listen = "127.0.0.1:7200"         # where the workers' connectors look for `peer://127.0.0.1:7200`
failure_policy = "recompute"      # with which they were started
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct


class UnusableFleet(ValueError):
    """The file cannot be used; the message says why and what would be legal."""


class Unconfirmed(Exception):
    """Nobody confirmed that these may be broken."""

    def __init__(self, targets: list[str]) -> None:
        super().__init__(", ".join(targets))
        self.targets = targets


class AttachedWorker(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: str
    pid: int | None = None
    uid: str | None = None
    start: str | None = None
    events: str = ""
    replay: str = ""
    adapter: str = "vllm"
    revision: str = ""
    kv_report: str = ""

    @property
    def identity(self) -> str:
        return str(self.pid if self.pid is not None else self.uid)


class AttachedStore(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the workers' connectors were told of the tier that they share."""

    listen: str
    failure_policy: Literal["recompute", "fail", "fallback"] = "recompute"

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(f"peer://{self.listen}")
        return parts.hostname or "127.0.0.1", parts.port or 0


class FleetFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    workers: tuple[AttachedWorker, ...]
    model: str
    staging: bool = False
    namespace: str = ""
    block_size: int = 16
    store: AttachedStore | None = None


def read_fleet(path: Path, confirmed: Sequence[str]) -> FleetFile:
    """Raises UnusableFleet, or Unconfirmed with the targets as they have to be confirmed: w0=PID."""
    try:
        fleet = msgspec.toml.decode(path.read_bytes(), type=FleetFile)
    except (OSError, msgspec.DecodeError) as problem:
        raise UnusableFleet(str(problem)) from problem
    if not fleet.staging:
        raise UnusableFleet("it does not say `staging = true`; drills break things, and never in production")
    for number, worker in enumerate(fleet.workers):
        if (worker.pid is None) == (worker.uid is None):
            raise UnusableFleet(f"worker {number} ({worker.url}) needs either `pid` or `uid`")
        if worker.pid is not None and not worker.start:
            raise UnusableFleet(f"worker {number} ({worker.url}) has no `start`: there would be no way back")
        if worker.pid is not None and not is_alive(worker.pid):
            raise UnusableFleet(f"worker {number} ({worker.url}): no process {worker.pid} is running")
    wanted = [f"w{number}={worker.identity}" for number, worker in enumerate(fleet.workers)]
    missing = [target for target in wanted if target not in confirmed]
    if missing:
        raise Unconfirmed(missing)
    return fleet


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()  # ended, and nobody has asked how
    except OSError:
        return True
