"""From one list of workers to another while the fleet runs. Pure: what is to be done, not doing it.

The two lists are two versions of the configuration. What did not change between them is left alone, so that workers
which were added or removed on the admin port meanwhile stay added or removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from kvrelay.edge.system.config import WorkerConfig


class FleetChange(Struct, frozen=True):
    """In this order: `removed` go, `added` come (a worker with other settings is in both), `kept` stay."""

    removed: tuple[str, ...]
    added: tuple[WorkerConfig, ...]
    kept: tuple[WorkerConfig, ...]


class WorkerClash(ValueError):
    """A new worker has the name or the URL of one that stays."""


def fleet_change(
    before: Iterable[WorkerConfig], after: Iterable[WorkerConfig], running: Mapping[str, WorkerConfig]
) -> FleetChange:
    """Raises WorkerClash."""
    old = {worker.name: worker for worker in before}
    new = {worker.name: worker for worker in after}
    names = dict.fromkeys((*old, *new))
    touched = [name for name in names if old.get(name) != new.get(name) and new.get(name) != running.get(name)]
    removed = tuple(name for name in touched if name in running)
    added = tuple(new[name] for name in touched if name in new)
    kept = tuple(worker for name, worker in running.items() if name not in removed)
    _refuse_clashes(kept, added)
    return FleetChange(removed, added, kept)


def _refuse_clashes(kept: Iterable[WorkerConfig], added: Iterable[WorkerConfig]) -> None:
    names = {worker.name: worker for worker in kept}
    urls = {worker.url: worker for worker in kept}
    for worker in added:
        known = names.get(worker.name) or urls.get(worker.url)
        if known is not None:
            raise WorkerClash(
                f"worker `{worker.name}` at {worker.url} clashes with `{known.name}` at {known.url},"
                " which was added on the admin port"
            )
