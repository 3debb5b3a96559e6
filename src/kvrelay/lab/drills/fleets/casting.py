"""Which of the workers that somebody else started play whom in a drill.

A drill names its workers and, of some, the revision of the model. A fleet has as many workers as it has: they are
dealt out in the drill's order, one from the start and one that joins later by turns, so that a drill about old and new
workers has both even where there are only two. Who gets no worker is left out, from the start and when it would join or
leave; the history says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest

from msgspec import Struct
from msgspec.structs import replace

from kvrelay.lab.drills.actions import Action, AddWorker, RemoveWorker, Rotate
from kvrelay.lab.drills.drill import Drill
from kvrelay.lab.drills.fleets.base import CannotDo


class Cast(Struct, frozen=True):
    """`entries`: the number of the fleet's worker by the name in the drill."""

    entries: dict[str, int]
    left_out: tuple[str, ...]
    missing: str | None = None  # whom the drill cannot do without

    def must_be_enough(self) -> None:
        """Raises CannotDo when nobody is there to begin with, or to join."""
        if self.missing is not None:
            raise CannotDo(self.missing)

    def plays(self, action: Action) -> Action | None:
        """The action as it concerns those who are there; None: it only concerns others."""
        match action:
            case AddWorker(worker) | RemoveWorker(worker):
                return None if worker in self.left_out else action
            case Rotate():
                return replace(action, keep=tuple(name for name in action.keep if name not in self.left_out))
            case _:
                return action


def cast(drill: Drill, revisions: Sequence[str]) -> Cast:
    """`revisions` of the fleet's workers, in its order."""
    from_the_start = [(plan.name, plan.revision) for plan in drill.setup.workers]
    later = [(action.worker, action.revision) for action in drill.actions() if isinstance(action, AddWorker)]
    free = list(enumerate(revisions))
    entries: dict[str, int] = {}
    for name, revision in filter(None, chain(*zip_longest(from_the_start, later))):
        entry = next((number for number, has in free if has == revision), None)
        if entry is not None:
            free = [(number, has) for number, has in free if number != entry]
            entries[name] = entry
    left_out = tuple(name for name, _ in (*from_the_start, *later) if name not in entries)
    missing = None
    for wanted in (from_the_start, later):
        if wanted and not any(name in entries for name, _ in wanted):
            name, revision = wanted[0]
            of = f" of revision `{revision}`" if revision else ""
            missing = f"the drill wants a worker{of} as `{name}`, and the fleet has none to spare"
    return Cast(entries, left_out, missing)
