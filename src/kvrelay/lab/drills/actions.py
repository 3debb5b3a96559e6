"""What can be done to a fleet: the whole vocabulary of whoever breaks things, and of whoever mends them.

An action is a value that a fleet carries out as it can. A worker is named, or found when it is needed: `home:SESSION`
is the worker that took the last turn of the session, `struck` the one that an action named last.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from kvrelay.core.model.units import Trigger


class Action(Struct, frozen=True):
    """Base of all."""

    @property
    def target(self) -> str | None:
        return getattr(self, "worker", None)

    def __str__(self) -> str:
        members = [str(getattr(self, name)) for name in self.__struct_fields__ if getattr(self, name) not in (None, ())]
        return " ".join([type(self).__name__, *members])


# --- worker processes ----------------------------------------------------------------------------------------------


class Kill(Action, frozen=True):
    """The process ends at once (SIGKILL)."""

    worker: str


class Terminate(Action, frozen=True):
    """The process is asked to end (SIGTERM): it ends what it has, and takes nothing new."""

    worker: str


class Start(Action, frozen=True):
    """A new process under the same name and address; it has nothing cached."""

    worker: str


class Freeze(Action, frozen=True):
    """The process stands still, its connections stay open (SIGSTOP)."""

    worker: str


class Thaw(Action, frozen=True):
    worker: str


class AddWorker(Action, frozen=True):
    """One more worker, in the configuration too. `revision`: of its weights."""

    worker: str
    revision: str = ""


class RemoveWorker(Action, frozen=True):
    """Out of the configuration; its process goes on with what it has."""

    worker: str


class Refuse(Action, frozen=True):
    """The next `count` requests of clients are answered with this status."""

    worker: str
    http_status: int
    count: int


class ForgetCaches(Action, frozen=True):
    """Every worker drops its cache, by the gateway's order."""


# --- the network -----------------------------------------------------------------------------------------------------


class Partition(Action, frozen=True):
    """Nothing passes between gateway and worker, and nobody is told so."""

    worker: str


class Slow(Action, frozen=True):
    """Every message between gateway and worker takes this much longer."""

    worker: str
    delay_s: float


class MendNetwork(Action, frozen=True):
    worker: str


# --- event streams ---------------------------------------------------------------------------------------------------


class LoseEvents(Action, frozen=True):
    """The next `batches` event batches of the worker are lost; None: all of them until `MendEvents`."""

    worker: str
    batches: int | None = None


class DoubleEvents(Action, frozen=True):
    """Every batch comes twice."""

    worker: str


class ShuffleEvents(Action, frozen=True):
    """Every other batch is overtaken by the one after it."""

    worker: str


class SilenceReplay(Action, frozen=True):
    """Requests for lost batches get no answer."""

    worker: str


class MendEvents(Action, frozen=True):
    worker: str


# --- the shared tier -------------------------------------------------------------------------------------------------


class StoreDown(Action, frozen=True):
    """`refuse`: nobody listens there. `stall`: it accepts and never answers."""

    how: Literal["refuse", "stall"] = "refuse"


class StoreUp(Action, frozen=True):
    """Within reach again, and its objects whole."""


class SpoilStore(Action, frozen=True):
    """What is read from now on: `truncated` and `damaged` objects, or `phantom` ones, which are known and not there."""

    how: Literal["truncated", "damaged", "phantom"]


class WipeStore(Action, frozen=True):
    """All that it had is gone, its index too, as after a restart without its disk."""


class CountReads(Action, frozen=True):
    """What the history says of reads is counted from here."""


# --- the gateway -----------------------------------------------------------------------------------------------------


class RestartGateway(Action, frozen=True):
    """Its process ends at once and another begins."""


class Pause(Action, frozen=True):
    """The gateway's process stands still for so long: for it, the clock jumps ahead."""

    seconds: float


class SetPolicy(Action, frozen=True):
    policy: str


class Rollback(Action, frozen=True):
    """`kvrelay rollback`: round robin, and every worker with its own cache only."""


class CloseSession(Action, frozen=True):
    session: str


class Rotate(Action, frozen=True):
    """A new epoch, see `core/routing/epochs.py`."""

    trigger: Trigger
    tenant: str | None = None
    adapter: str | None = None
    keep: tuple[str, ...] = ()
