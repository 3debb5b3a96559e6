"""A fleet file: `[[workers]]` as in the configuration, and what cannot be asked of a worker.

[[workers]]
name = "a"
url = "http://127.0.0.1:8100"

[model]                          # where the weights come from, if the path that the engine shows does not say
revision = "0123456789abcdef0123456789abcdef01234567"

[notes.a]                        # of a worker on another machine
log = "gpu1:/var/log/vllm-a.log"
gpu_uuids = ["GPU-..."]
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from pydantic import ValidationError

from kvrelay.edge.system.sections import WorkerConfig
from kvrelay.lab.arms.model_facts import StatedModel

_TABLES = ("workers", "model", "notes", "router")


class FleetFileError(Exception):
    """The file is no fleet: what was found, and what would be legal."""

    def __init__(self, found: str, legal: str) -> None:
        super().__init__(f"{found}; legal: {legal}")
        self.found, self.legal = found, legal


class Note(Struct, frozen=True, forbid_unknown_fields=True):
    """Of one worker. A note never makes anything a GPU result: hardware is looked at and not believed."""

    log: str | None = None
    gpu_uuids: tuple[str, ...] = ()


class FleetFile(Struct, frozen=True, eq=False):
    workers: tuple[WorkerConfig, ...]
    model: StatedModel
    notes: Mapping[str, Note]
    has_router: bool = False  # arms do not use it: each has a router of its own

    def lines(self, worker: WorkerConfig) -> tuple[str, ...]:
        """Of the worker's table in a gateway's configuration, with what was set and nothing else."""
        return tuple(
            f"{name} = {json.dumps(str(value) if isinstance(value, Path) else value)}"
            for name, value in worker.model_dump(exclude_unset=True).items()
        )

    def headers(self, worker: WorkerConfig) -> dict[str, str]:
        if worker.api_key_file is None:
            return {}
        return {"Authorization": f"Bearer {worker.api_key_file.read_text().strip()}"}


def read_fleet(path: Path) -> FleetFile:
    """Raises OSError or FleetFileError."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise FleetFileError(str(problem), "TOML in UTF-8") from problem
    unknown = [name for name in table if name not in _TABLES]
    if unknown:
        raise FleetFileError(f"unknown table `{unknown[0]}`", ", ".join(f"`{name}`" for name in _TABLES))
    workers = tuple(_worker(number, item, path) for number, item in enumerate(table.get("workers", [])))
    if not workers:
        raise FleetFileError("no worker", "one [[workers]] table or more, each with a `url`")
    _names_differ(workers)
    try:
        model = msgspec.convert(table.get("model", {}), StatedModel)
        notes = msgspec.convert(table.get("notes", {}), dict[str, Note])
    except msgspec.ValidationError as problem:
        legal = "[model] with `path`, `revision`; [notes.WORKER] with `log`, `gpu_uuids`"
        raise FleetFileError(str(problem), legal) from problem
    strangers = [name for name in notes if name not in {worker.name for worker in workers}]
    if strangers:
        raise FleetFileError(f"a note on `{strangers[0]}`", f"notes on {', '.join(worker.name for worker in workers)}")
    return FleetFile(workers, model, notes, "router" in table)


def _worker(number: int, item: Any, path: Path) -> WorkerConfig:
    try:
        worker = WorkerConfig.model_validate(item)
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        where = ".".join(("workers", str(number), *map(str, first["loc"])))
        raise FleetFileError(f"`{where}`: {first['msg']}", "a `url`, and what else `[[workers]]` knows") from problem
    files = {name: path.parent / value for name in ("api_key_file", "ca_file") if (value := getattr(worker, name))}
    return worker.model_copy(update=files)


def _names_differ(workers: tuple[WorkerConfig, ...]) -> None:
    names = [worker.name for worker in workers]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise FleetFileError(f"two workers called `{twice[0]}`", "a `name` of its own for each")
