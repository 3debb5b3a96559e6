"""Whom an action means: a name, whoever took a session's last turn, or whoever was struck last."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvrelay.lab.drills.fleets.base import CannotDo
from kvrelay.lab.drills.history import Deed

HOME, STRUCK = "home:", "struck"


def resolve(target: str | None, served: Iterable[tuple[str | None, str | None]], deeds: Sequence[Deed]) -> str | None:
    """`served` has (session, worker) of all turns so far, oldest first. Raises CannotDo if nobody is meant."""
    if target is None or (target != STRUCK and not target.startswith(HOME)):
        return target
    if target == STRUCK:
        struck = [deed.worker for deed in deeds if deed.worker is not None]
        if not struck:
            raise CannotDo("nobody was struck yet")
        return struck[-1]
    session, home = target.removeprefix(HOME), None
    for whose, worker in served:
        if whose == session and worker is not None:
            home = worker
    if home is None:
        raise CannotDo(f"nobody is known to have served session `{session}`")
    return home
