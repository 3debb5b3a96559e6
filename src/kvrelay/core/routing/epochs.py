"""Generations of keys: after something incompatible changed, no request may meet KV from before.

An engine names its blocks by the tokens and a salt; it knows nothing of a new tokenizer, template, adapter or policy of
a tenant. So an epoch becomes a part of the salt that a request carries: what was computed before has other names in
the worker, in the index and in every store that goes by the worker's names, and is never found again. The epoch is
taken once, when a request arrives, and goes with all its attempts.

A worker whose own software or weights changed with the epoch (a new revision, a new tokenizer) cannot be mended by a
salt: those that were there before are retired, unless the operator says that they are new already. They end what they
have and get nothing more; a new process under the same name is current. A worker that does not keep caches with
different salts apart is retired by any rotation, until it is restarted or its cache is reset through us.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from kvrelay.core.model.events import EpochRotated, WorkerSpec
from kvrelay.core.model.ids import WorkerId
from kvrelay.core.model.prompt import Tenant
from kvrelay.core.model.units import Trigger

FIRST = "0"
MAX_SCOPES = 4096  # tenants and adapters with epochs of their own; one more rotates the whole fleet
_NEW_WORKERS = frozenset({Trigger.REVISION, Trigger.TOKENIZER})


class EpochState(Struct, frozen=True):
    """All that must outlive a restart of the router. `retired` has worker name -> (incarnation, trigger)."""

    fleet: int = 0
    tenants: Mapping[str, int] = field(default_factory=dict)
    adapters: Mapping[str, int] = field(default_factory=dict)
    retired: Mapping[str, tuple[str, Trigger]] = field(default_factory=dict)


class Epochs:
    """Which epoch a request belongs to, and which lives of workers are of a past one."""

    def __init__(self, state: EpochState = EpochState()) -> None:
        self._fleet = state.fleet
        self._tenants = dict(state.tenants)
        self._adapters = dict(state.adapters)
        self._retired = dict(state.retired)

    @property
    def state(self) -> EpochState:
        return EpochState(self._fleet, dict(self._tenants), dict(self._adapters), dict(self._retired))

    @property
    def begun(self) -> bool:
        """Has there been any rotation, so that requests may carry a salt?"""
        return bool(self._fleet or self._tenants or self._adapters)

    def tag(self, tenant: str, adapter: str | None) -> str:
        """The epoch of a request: equal tags may share KV, different ones never do."""
        tag = str(self._fleet)
        if tenant in self._tenants:
            tag += f".t{self._tenants[tenant]}"
        if adapter is not None and adapter in self._adapters:
            tag += f".a{self._adapters[adapter]}"
        return tag

    def salted(self, tenant: Tenant, tag: str) -> Tenant:
        """The tenant with the salt that its requests carry in this epoch. In the first one nothing is added."""
        return tenant if tag == FIRST else replace(tenant, salt=f"{tenant.salt or ''}~epoch-{tag}")

    def is_retired(self, worker: WorkerId) -> bool:
        """Is this life of the worker of a past epoch?"""
        return worker.name in self._retired and self._retired[worker.name][0] == worker.incarnation

    def outdated(self, event: EpochRotated, workers: Iterable[tuple[WorkerId, WorkerSpec]]) -> tuple[WorkerId, ...]:
        """Whom this rotation would retire. Changes nothing."""
        return tuple(
            worker
            for worker, spec in workers
            if worker.name not in event.keep and (event.trigger in _NEW_WORKERS or not spec.separates_salts)
        )

    def rotate(self, event: EpochRotated, workers: Iterable[tuple[WorkerId, WorkerSpec]]) -> tuple[WorkerId, ...]:
        """A new epoch begins for what the event names; answers the workers that are retired by it."""
        if event.trigger is Trigger.TENANT_POLICY and event.tenant is not None and self._has_room():
            self._tenants[event.tenant] = self._tenants.get(event.tenant, 0) + 1
        elif event.trigger is Trigger.ADAPTER and event.adapter is not None and self._has_room():
            self._adapters[event.adapter] = self._adapters.get(event.adapter, 0) + 1
        else:
            self._fleet += 1
            self._tenants.clear()  # the fleet's number makes every tag a new one
            self._adapters.clear()
        retired = self.outdated(event, workers)
        for worker in retired:
            self._retired[worker.name] = worker.incarnation, event.trigger
        return retired

    def emptied(self, worker: WorkerId) -> bool:
        """Its cache was reset: it is current again if old KV was all that spoke against it. True if it is."""
        if not self.is_retired(worker) or self._retired[worker.name][1] in _NEW_WORKERS:
            return False
        del self._retired[worker.name]
        return True

    def joined(self, worker: WorkerId) -> bool:
        """A life of a worker began, or was met for the first time; True if it is of a past epoch."""
        if self.is_retired(worker):
            return True
        self._retired.pop(worker.name, None)
        return False

    def _has_room(self) -> bool:
        return len(self._tenants) + len(self._adapters) < MAX_SCOPES
