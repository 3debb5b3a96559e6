"""Defects of the shared store, see `mutants.py`."""

from __future__ import annotations

from typing import Any

import msgspec
from tests.lab.drills.planting import Mutant, always, replacing

from kvrelay.core.contract.fields import Contract
from kvrelay.core.tiers.breaker import Breaker
from kvrelay.core.tiers.effects import LookupAnswered
from kvrelay.core.tiers.loads import Loads
from kvrelay.core.tiers.lookups import Lookups
from kvrelay.core.tiers.outcome import Outcome
from kvrelay.core.tiers.saves import Saves
from kvrelay.core.tiers.slots import Slots
from kvrelay.edge.stores import object as object_module
from kvrelay.edge.stores.reading import Reader
from kvrelay.edge.worker.kv_store import WorkerStore


def _of_request(**members: Any) -> Any:
    """The namespace, of a request with these members made from what they are."""

    def make(right: Any) -> Any:
        def namespace(self: WorkerStore, request: Any) -> Any:
            changed = {name: change(getattr(request, name)) for name, change in members.items()}
            return right(self, msgspec.structs.replace(request, **changed))

        return namespace

    return make


def _without_epoch(salt: str | None) -> str | None:
    return salt.partition("~epoch")[0] or None if salt is not None else None


class _Forgetful(dict[Any, Any]):
    """Nothing that is under way is ever found."""

    def get(self, key: Any, default: Any = None) -> Any:
        return default

    def __delitem__(self, key: Any) -> None:
        self.pop(key, None)


def _each_for_itself(right: Any) -> Any:
    def init(self: Loads, shared: Any) -> None:
        right(self, shared)
        self._by_key = _Forgetful()

    return init


def _takes_any_size(right: Any) -> Any:
    return lambda self, now_s, event, tier: right(
        self, now_s, msgspec.structs.replace(event, outcome=Outcome.HIT), tier
    )


def _manifest_first(right: Any) -> Any:
    """The chunk counts with its first piece."""

    def checked(self: Saves, now_s: float, event: Any, tier: Any) -> Any:
        target = self._targets[event.job]
        if event.outcome is Outcome.HIT and target.verified == 0 and target.writes_in_all > 1:
            target.verified = target.save.asked.pieces - 1
        return right(self, now_s, event, tier)

    return checked


def _says_absent(right: Any) -> Any:
    def answer(self: Lookups, now_s: float, lookup: Any) -> Any:
        effects = right(self, now_s, lookup)
        return [msgspec.structs.replace(e, unasked=()) if isinstance(e, LookupAnswered) else e for e in effects]

    return answer


def _unbounded(right: Any) -> Any:
    return lambda self, limit: right(self, 1_000_000)


def _half_is_enough(right: Any) -> Any:
    def unpacked(self: Reader, wanted: Any, data: Any, into: memoryview, until_s: float) -> Any:
        outcome, moved = right(self, wanted, data, into, until_s)
        piece = wanted.expected.role == "piece"
        return (Outcome.HIT if piece and outcome is Outcome.MISS else outcome), moved

    return unpacked


_UNVERIFIED = always(object_module.HIT)
_UNCOMPARED = always((Outcome.HIT, ""))
_NO_TENANT, _NO_EPOCH = _of_request(salt=lambda salt: None), _of_request(salt=_without_epoch)
_NO_ADAPTER = _of_request(adapter=lambda adapter: None)

STORE_MUTANTS = (
    Mutant("what is read from a store is not verified", replacing(object_module, "check_payload", _UNVERIFIED)),
    Mutant("what is read is not compared with what was asked for", replacing(object_module, "judge", _UNCOMPARED)),
    Mutant("stored keys leave out the tenant", replacing(WorkerStore, "_namespace", _NO_TENANT)),
    Mutant("stored keys leave out the epoch", replacing(WorkerStore, "_namespace", _NO_EPOCH)),
    Mutant("stored keys leave out the adapter", replacing(WorkerStore, "_namespace", _NO_ADAPTER)),
    Mutant("stored keys leave out the contract", replacing(Contract, "digest", always(bytes(32)))),
    Mutant("one object is fetched several times at once", replacing(Loads, "__init__", _each_for_itself)),
    Mutant("an object is announced before it was verified", replacing(Saves, "checked", _takes_any_size)),
    Mutant("a chunk counts before it is complete", replacing(Saves, "checked", _manifest_first)),
    Mutant("a chunk counts that has a piece missing", replacing(Reader, "_unpacked", _half_is_enough)),
    Mutant("reads of a store have no bound", replacing(Slots, "__init__", _unbounded)),
    Mutant("a tier that was out of use stays so", replacing(Breaker, "pinged", always(False))),
    Mutant("no answer is taken for absent", replacing(Lookups, "_answer", _says_absent), "store-outage-fail"),
)
