"""The workers the router knows, and which of them are candidates for a request.

Filters run in this order: alive, not draining, model or adapter, role, capacity, did not just refuse. What does not
change between two requests is kept; a fleet of hundreds is not walked per request.

A request for which nobody routable is left goes to the least bad of the others, as long as no probe says that they are
gone: a refusal is certain to disappoint its client, a suspended worker is not (docs/decisions/0007-last-resort.md).
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from kvrelay.core.index.agent_word import AgentWord
from kvrelay.core.index.approximate import Approximate
from kvrelay.core.index.drift import Drift
from kvrelay.core.index.sequence import Sequence
from kvrelay.core.load.ledger import Ledger
from kvrelay.core.model.arrays import Floats, Ints
from kvrelay.core.model.events import WorkerSpec
from kvrelay.core.model.ids import TargetId, WorkerId
from kvrelay.core.model.place import Hop, HopCosts, Place, hop_between
from kvrelay.core.model.units import IndexState
from kvrelay.core.routing.capacity import Capacity
from kvrelay.core.routing.health import Health, Standing
from kvrelay.core.routing.refusals import Refusals


class Target:
    """One rank of a live worker."""

    __slots__ = (
        "agent",
        "approximate",
        "block_size_tokens",
        "catching_up",
        "drift",
        "hop",
        "id",
        "index_broken",
        "sequence",
        "skipped_alone",
        "slot",
    )

    def __init__(self, target_id: TargetId, slot: int, block_size_tokens: int) -> None:
        self.id = target_id
        self.slot = slot
        self.block_size_tokens = block_size_tokens  # 0: unknown
        self.hop = Hop.UNKNOWN
        self.sequence: Sequence | None = None  # workers with events
        self.drift: Drift | None = None  # the same ones
        self.approximate: Approximate | None = None  # workers without
        self.agent: AgentWord | None = None  # what the agent beside the worker says
        self.index_broken: str | None = None  # why nothing of this worker can match
        self.skipped_alone: int | None = 0  # events that could not be indexed, until the first that could (None)
        self.catching_up = False  # a part of its known history has not been applied yet

    @property
    def index_state(self) -> IndexState:
        if self.index_broken is not None:
            return IndexState.UNUSABLE
        if self.sequence is not None:
            return IndexState.INCOMPLETE if self.catching_up else self.sequence.state
        return IndexState.APPROXIMATE


class Worker:
    """One live incarnation of a worker."""

    __slots__ = ("draining", "health", "id", "retired", "spec", "targets")

    def __init__(self, worker_id: WorkerId, spec: WorkerSpec, health: Health, targets: tuple[Target, ...]) -> None:
        self.id = worker_id
        self.spec = spec
        self.health = health
        self.targets = targets
        self.draining = False
        self.retired = False  # of a past epoch

    @property
    def leaving(self) -> bool:
        """It ends what it has and gets nothing more."""
        return self.draining or self.retired

    def serves(self, model: str | None) -> bool:
        spec = self.spec
        return model is None or not spec.models or model in spec.models or model in spec.adapters


class Candidates(Struct, frozen=True, eq=False):
    """Slots that passed the filters, ascending; or why there is none."""

    slots: Ints
    why_none: str | None = None
    refusing: bool = False  # all of them just said "not now"
    last_resort: bool = False  # something speaks against each of them, and nobody better is there


_STANDINGS_TO_TRY = (Standing.ROUTABLE, Standing.SUSPENDED, Standing.UNREACHED)
_NOBODY: Ints = np.zeros(0, dtype=np.int64)


class FleetView:
    """Registry of live workers by name and of their targets by slot."""

    def __init__(self, *, capacity: Capacity, place: Place = Place(), hops: HopCosts = HopCosts()) -> None:
        self.capacity = capacity
        self._place = place
        self._hops = hops
        self.hop_ms: list[float] = []
        """What the way there costs, by slot."""
        self.hop_ms_of_many: Floats | None = None
        """The same as an array; None: nothing for anybody."""
        self.workers: dict[str, Worker] = {}
        self.targets: list[Target | None] = []
        self.drained: dict[str, None] = {}  # an operator's wish, by name: it is older and lives longer than a process
        self.refusals = Refusals()
        self.block_size_of_slot: Ints = np.zeros(0, dtype=np.int64)
        self._kept: dict[str | None, Candidates] = {}
        self._adapters: frozenset[str] = frozenset()
        self._limits: Ints | None = None
        self._limited = False
        self.block_sizes: tuple[int, ...] = ()
        """In use, ascending; each needs its own keys of a prompt."""

    def add(self, worker: Worker) -> None:
        self.workers[worker.id.name] = worker
        self._seat_all(worker)
        self._list_adapters()
        self.changed()

    def remove(self, name: str) -> Worker | None:
        worker = self.workers.pop(name, None)
        if worker is not None:
            self.refusals.forget(name)
            for target in worker.targets:
                self._seat(target.slot, None)
            self._list_adapters()
            self.changed()
        return worker

    def _list_adapters(self) -> None:
        self._adapters = frozenset(name for worker in self.workers.values() for name in worker.spec.adapters)

    def move(self, place: Place, hops: HopCosts) -> None:
        """The operator says anew where we are, or what a way costs."""
        if (place, hops) == (self._place, self._hops):
            return
        self._place, self._hops = place, hops
        for worker in self.workers.values():
            self._seat_all(worker)

    def _seat_all(self, worker: Worker) -> None:
        for target in worker.targets:
            target.hop = hop_between(self._place, worker.spec.place)
            self._seat(target.slot, target)

    def resized(self, target: Target, block_size_tokens: int) -> None:
        """The worker's events showed its real block size."""
        target.block_size_tokens = block_size_tokens
        self._seat(target.slot, target)

    def _seat(self, slot: int, target: Target | None) -> None:
        """Copy on write: a decision keeps the list it was made with."""
        more = max(0, slot + 1 - len(self.targets))
        self.targets = [*self.targets, *[None] * more]
        self.targets[slot] = target
        self.block_size_of_slot = np.append(self.block_size_of_slot, np.zeros(more, dtype=np.int64))
        self.block_size_of_slot[slot] = target.block_size_tokens if target is not None else 0
        self.hop_ms += [0.0] * more
        self.hop_ms[slot] = 0.0 if target is None else self._hops.of(target.hop)
        self.hop_ms_of_many = np.array(self.hop_ms) if any(self.hop_ms) else None
        self.block_sizes = tuple(int(size) for size in np.unique(self.block_size_of_slot) if size)

    def changed(self) -> None:
        """Something that filters look at changed."""
        self._kept.clear()
        self._limits = None

    def live(self, worker_id: WorkerId) -> Worker | None:
        """The worker, if this very incarnation of it is the live one."""
        worker = self.workers.get(worker_id.name)
        return worker if worker is not None and worker.id == worker_id else None

    def target(self, worker_id: WorkerId, rank: int) -> Target | None:
        worker = self.live(worker_id)
        return worker.targets[rank] if worker is not None and 0 <= rank < len(worker.targets) else None

    def at(self, slot: int) -> Target:
        target = self.targets[slot]
        assert target is not None, f"slot {slot} is empty"
        return target

    def worker_at(self, slot: int) -> Worker:
        return self.workers[self.at(slot).id.worker.name]

    def adapter_of(self, model: str | None) -> str | None:
        """The adapter that a model name means, if any worker lists it as one."""
        return model if model in self._adapters else None

    def candidates(self, now: float, model: str | None, ledger: Ledger, without: frozenset[str]) -> Candidates:
        """Who may get the request. `without` names workers that were tried already."""
        found = self._kept.get(model)
        if found is None:
            found = self._filter(now, model, frozenset())
            if all(worker.health.steady for worker in self.workers.values()):
                if len(self._kept) > 256:  # model names come from clients
                    self._kept.clear()
                self._kept[model] = found
        if without and found.why_none is None:
            found = self._not_tried(now, model, found, without)
        return self._not_refusing(now, self._with_capacity(found, ledger))

    def anyone(self, now: float) -> bool:
        """Whether a request that came now would be sent to somebody, whatever it asks for."""
        return any(
            worker.health.standing(now) is not Standing.DEAD and not worker.leaving for worker in self.workers.values()
        )

    def _not_tried(self, now: float, model: str | None, found: Candidates, without: frozenset[str]) -> Candidates:
        slots = found.slots[[self.at(slot).id.worker.name not in without for slot in found.slots.tolist()]]
        if len(slots):
            return Candidates(slots, last_resort=found.last_resort)
        others = self._filter(now, model, without)
        return others if others.why_none is None else Candidates(_NOBODY, "all_tried")

    def _filter(self, now: float, model: str | None, without: frozenset[str]) -> Candidates:
        """The best standing at which anybody fits; without any, what was missing at the best of them."""
        workers = [worker for worker in self.workers.values() if worker.id.name not in without]
        if not workers:
            return Candidates(_NOBODY, "no_worker_known")
        claimed = any(worker.serves(model) for worker in self.workers.values())
        standings = [worker.health.standing(now) for worker in workers]
        why_none = "no_worker_alive"
        for standing in _STANDINGS_TO_TRY:
            alive = [worker for worker, its in zip(workers, standings, strict=True) if its is standing]
            fitting = _fitting(alive, model, claimed=claimed)
            if not isinstance(fitting, str):
                return _candidates_of(fitting, standing)
            if why_none == "no_worker_alive":
                why_none = fitting
        return Candidates(_NOBODY, why_none)

    def _with_capacity(self, found: Candidates, ledger: Ledger) -> Candidates:
        if found.why_none is not None:
            return found
        if self._limits is None:
            self._limits = np.array([self._limit(target) for target in self.targets], dtype=np.int64)
            self._limited = bool(self._limits.any())
        if not self._limited:
            return found
        limits = self._limits[found.slots]
        free = found.slots[(limits == 0) | (self.capacity.used_of_all(ledger.table()).take(found.slots) < limits)]
        return Candidates(free, None if len(free) else "at_capacity", last_resort=found.last_resort)

    def _not_refusing(self, now: float, found: Candidates) -> Candidates:
        refusing = self.refusals.passed_over(now)
        if not refusing:
            return found
        others = [slot for slot in found.slots.tolist() if self.at(slot).id.worker.name not in refusing]
        if not others:
            return Candidates(found.slots, found.why_none, refusing=True, last_resort=found.last_resort)
        return Candidates(np.array(others, dtype=np.int64), last_resort=found.last_resort)

    def turns_away(self, now: float, slot: int, ledger: Ledger) -> bool:
        """Whether it is at its limit or has just said "not now"."""
        target = self.at(slot)
        limit = self._limit(target)
        full = bool(limit) and self.capacity.used(ledger.slots[slot]) >= limit
        return full or target.id.worker.name in self.refusals.passed_over(now)

    def _limit(self, target: Target | None) -> int:
        if target is None:
            return 0
        return self.workers[target.id.worker.name].spec.max_active_requests or 0


def _fitting(alive: list[Worker], model: str | None, *, claimed: bool) -> list[Worker] | str:
    """Who of them may take a request for this model, or what was missing. `claimed`: somebody known serves it."""
    if not alive:
        return "no_worker_alive"
    willing = [worker for worker in alive if not worker.leaving]
    if not willing:
        return "all_draining"
    # Where nobody claims the model, a worker's own "no such model" is the right answer.
    serving = [worker for worker in willing if worker.serves(model)] if claimed else willing
    if not serving:
        return "no_worker_for_model"
    fitting = [worker for worker in serving if worker.spec.role in ("both", "decode")]
    return fitting or "no_worker_for_role"


def _candidates_of(workers: list[Worker], standing: Standing) -> Candidates:
    """Of suspended workers those with the fewest relapses: who fails for a moment before who fails for good."""
    if standing is Standing.SUSPENDED:
        fewest = min(worker.health.relapses for worker in workers)
        workers = [worker for worker in workers if worker.health.relapses == fewest]
    slots = np.array(sorted(target.slot for worker in workers for target in worker.targets), dtype=np.int64)
    return Candidates(slots, last_resort=standing is not Standing.ROUTABLE)
