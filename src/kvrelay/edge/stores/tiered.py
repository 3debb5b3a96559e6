"""The tiered store as a connector uses it: look up, fetch, keep, over all tiers, from any thread.

Every call has a form that returns a future and one that waits for it. A wait ends by the configured deadline (a save's
by the write deadline), whatever the tiers do. What to do with an outcome other than `hit` is the failure policy's
matter: `recompute` (default), `fail`, or `fallback` to the tiers below before computing anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct

from kvrelay.core.contract.digest import keyed_digest
from kvrelay.core.contract.fields import Contract
from kvrelay.core.contract.identity import Namespace
from kvrelay.core.tiers.breakeven import BreakEven
from kvrelay.core.tiers.effects import LoadFinished, LookupAnswered, RemovalFinished, SaveFinished, TierEffect
from kvrelay.core.tiers.events import (
    FetchSeen,
    LoadAsked,
    LookupAsked,
    ObjectsFound,
    PrefillSeen,
    RemovalAsked,
    SaveAsked,
    WarmAsked,
)
from kvrelay.core.tiers.header import Expected, ObjectHeader
from kvrelay.core.tiers.machine import TierMachine
from kvrelay.core.tiers.outcome import Outcome
from kvrelay.edge.stores.buffers import Lease
from kvrelay.edge.stores.ciphers import TAG_BYTES
from kvrelay.edge.stores.codecs import RAW
from kvrelay.edge.stores.config import StoreConfig, open_store
from kvrelay.edge.stores.contracts import nearest_difference, write_contract
from kvrelay.edge.stores.host import Destinations, HostTier, TierHost
from kvrelay.edge.stores.keys import KeyRing, load_key_ring
from kvrelay.edge.stores.metrics import StoreTimes, counter_lines
from kvrelay.edge.stores.object import HEAD_BYTES, Owner
from kvrelay.edge.stores.reading import Reader, Wanted
from kvrelay.edge.stores.runtime import Runtime, Threads
from kvrelay.edge.stores.scope import Scope, scope_of
from kvrelay.edge.stores.store import Buffer, Store, StoreError, total_bytes
from kvrelay.edge.stores.writing import Writing

TAG_OF_TENANT_BYTES = 8
SCAN_DEADLINE_S = 5.0
Answer = TypeVar("Answer")


class ChunkShape(Struct, frozen=True):
    """What all chunks of a worker have in common. `payload_bytes` is the size of one destination."""

    tokens: int
    payload_bytes: int
    layers: int
    dtype: str
    shape: tuple[int, ...] = ()


class LookupPlan(Struct, frozen=True):
    """What could be loaded: `keys` are the leading chunks that some tier says it has, `places` the tiers of each.

    It is a hint until it is fetched. `fetch` false: computing is predicted to be quicker, `reason` says with which
    times. `unasked` names tiers that are out of use or did not answer in time."""

    namespace: Namespace
    shape: ChunkShape
    keys: tuple[bytes, ...]
    places: tuple[tuple[int, ...], ...]
    fetch: bool
    predicted_fetch_ms: float | None
    predicted_recompute_ms: float | None
    reason: str
    unasked: tuple[str, ...]
    ms: float

    @property
    def tokens(self) -> int:
        return len(self.keys) * self.shape.tokens


class FetchOutcome(Struct, frozen=True):
    """One outcome per key of the plan, in order. Destinations of keys that are no `hit` have undefined content."""

    outcomes: tuple[Outcome, ...]
    failed: bool  # the policy is `fail`, and something was not there as promised
    bytes_by_tier: Mapping[str, int]
    ms_by_tier: Mapping[str, float]
    ms: float
    scopes: tuple[Scope | None, ...]  # per key: how far a `hit` came

    @property
    def ready(self) -> bool:
        """Everything that was asked for is there and verified."""
        return all(outcome is Outcome.HIT for outcome in self.outcomes)

    @property
    def leading_hits(self) -> int:
        """How many chunks from the start may be used."""
        return next((i for i, outcome in enumerate(self.outcomes) if outcome is not Outcome.HIT), len(self.outcomes))

    @property
    def bytes_read(self) -> int:
        return sum(self.bytes_by_tier.values())


class StoreOutcome(Struct, frozen=True):
    """What became of one object in each tier."""

    by_tier: Mapping[str, Outcome]
    ms: float

    @property
    def stored(self) -> bool:
        """At least one tier has it."""
        return any(outcome is Outcome.STORED for outcome in self.by_tier.values())


class TieredStore:
    """See the module text. One per process; `close` when done.

    `stores` stand in for those that the URLs name (wrapped ones, for drills; None: the one that is named). `seed` is
    for the waits between questions to a tier that is out of use; None: by chance.
    """

    def __init__(
        self,
        config: StoreConfig,
        *,
        ring: KeyRing | None = None,
        stores: Sequence[Store | None] | None = None,
        runtime: Runtime | None = None,
        seed: int | None = None,
        announce: Callable[[str, bytes, int], None] | None = None,
        observe: Callable[[str, str, Outcome, float], None] | None = None,
        state_changed: Callable[[str, bool], None] | None = None,
    ) -> None:
        self.config = config
        self._runtime = runtime or Threads()
        self._ring = load_key_ring(config.keys, cipher=config.cipher) if ring is None else ring
        self._deadline_s = config.deadline_ms / 1000
        self._names = config.tier_names()
        self._scopes = [scope_of(tier.url) for tier in config.tiers]
        self._owners: dict[tuple[str, bytes, int], Owner] = {}
        self._readers: list[Reader] = []
        tiers = [self._open_tier(i, None if stores is None else stores[i]) for i in range(len(config.tiers))]
        self._times = StoreTimes()
        chance = int.from_bytes(os.urandom(8), "big") if seed is None else seed
        self._host = TierHost(
            TierMachine(config.settings(), seed=chance),
            tiers,
            runtime=self._runtime,
            announce=announce,
            observe=observe or self._times.observe,
            state_changed=state_changed,
        )
        self._count_what_is_there(tiers)
        self._reconciling = (
            self._runtime.alarm(self._reconcile_now_and_then) if any(t.index for t in config.tiers) else None
        )
        if self._reconciling is not None:
            self.reconcile(late=False)
            self._reconciling.set(self._runtime.now_s() + config.reconcile_s)

    @classmethod
    def open(cls, config: StoreConfig | Mapping[str, Any], **options: Any) -> TieredStore:
        """From a configuration, or from the mapping that a connector was given."""
        if not isinstance(config, StoreConfig):
            config = StoreConfig.from_mapping(config, source="the connector's options")
        return cls(config, **options)

    # --- reading -----------------------------------------------------------------------------------------------------

    def lookup_async(self, namespace: Namespace, chunk_keys: Sequence[bytes], shape: ChunkShape) -> Future[LookupPlan]:
        owner, began_s = self._owner(namespace), self._runtime.now_s()
        names = tuple(owner.tag + key for key in chunk_keys)

        def plan(effect: TierEffect) -> LookupPlan:
            assert isinstance(effect, LookupAnswered)
            verdict: BreakEven = effect.verdict
            return LookupPlan(
                namespace=namespace,
                shape=shape,
                keys=tuple(chunk_keys[: len(effect.places)]),
                places=effect.places,
                fetch=verdict.fetch and bool(effect.places),
                predicted_fetch_ms=verdict.fetch_ms,
                predicted_recompute_ms=verdict.recompute_ms,
                reason=verdict.reason,
                unasked=tuple(self._names[i] for i in effect.unasked),
                ms=self._ms_since(began_s),
            )

        deadline_s = began_s + self._deadline_s
        asked = self._host.ask(
            "lookup", lambda number: LookupAsked(number, names, shape.payload_bytes, shape.tokens, deadline_s)
        )
        return _then(asked, plan)

    def lookup(self, namespace: Namespace, chunk_keys: Sequence[bytes], shape: ChunkShape) -> LookupPlan:
        """How many of the leading chunks are probably there, where, and whether fetching them pays."""
        return self.lookup_async(namespace, chunk_keys, shape).result()

    def plan(self, namespace: Namespace, chunk_keys: Sequence[bytes], shape: ChunkShape) -> LookupPlan:
        """A plan without asking: every tier may have every chunk. For a reader that was told what to load."""
        places = (tuple(range(len(self._names))),) * len(chunk_keys)
        return LookupPlan(namespace, shape, tuple(chunk_keys), places, True, None, None, "", (), 0.0)

    def fetch_async(self, plan: LookupPlan, into: Sequence[memoryview]) -> Future[FetchOutcome]:
        assert len(into) == len(plan.keys), f"{len(plan.keys)} chunks, {len(into)} destinations"
        owner, began_s = self._owner(plan.namespace), self._runtime.now_s()
        wanted = tuple(self._wanted(plan, owner, key) for key in plan.keys)
        destinations = Destinations(Lease([view.cast("B") for view in into]), wanted)

        def outcome(effect: TierEffect) -> FetchOutcome:
            assert isinstance(effect, LoadFinished)
            return FetchOutcome(
                outcomes=effect.outcomes,
                failed=effect.failed,
                bytes_by_tier=dict(zip(self._names, effect.bytes_by_tier, strict=True)),
                ms_by_tier={n: s * 1000 for n, s in zip(self._names, effect.seconds_by_tier, strict=True)},
                scopes=tuple(None if i is None else self._scopes[i] for i in effect.found_in),
                ms=self._ms_since(began_s),
            )

        names, deadline_s = tuple(object_.name for object_ in wanted), began_s + self._deadline_s
        asked = self._host.ask(
            "load", lambda number: LoadAsked(number, names, plan.places, deadline_s), carry=destinations
        )
        return _then(asked, outcome)

    def fetch(self, plan: LookupPlan, into: Sequence[memoryview]) -> FetchOutcome:
        """Bring the plan's chunks into these buffers, one each, writable and of `shape.payload_bytes`. After it returns
        nobody writes to them."""
        return self.fetch_async(plan, into).result()

    # --- writing -----------------------------------------------------------------------------------------------------

    def store_async(
        self, namespace: Namespace, key: bytes, shape: ChunkShape, parts: Sequence[Buffer], *, start_token: int = 0
    ) -> Future[StoreOutcome]:
        """The parts must not change until the future is done."""
        owner, began_s, size = self._owner(namespace), self._runtime.now_s(), total_bytes(parts)
        assert size == shape.payload_bytes, f"{size} bytes given, a chunk has {shape.payload_bytes}"
        now_s = self._runtime.wall_s()
        header = ObjectHeader(
            contract_digest=namespace.contract_digest,
            key=key,
            tenant_tag=owner.tag,
            epoch=namespace.epoch,
            start_token=start_token,
            end_token=start_token + shape.tokens,
            layers=shape.layers,
            dtype=shape.dtype,
            shape=shape.shape,
            plain_bytes=size,
            codec=RAW,
            cipher="",
            key_id="",
            created_s=now_s,
            expires_s=None if self.config.ttl_s is None else now_s + self.config.ttl_s,
        )
        writing = Writing(
            owner.tag + key,
            header,
            parts,
            owner=owner,
            ring=self._ring,
            codecs=[tier.codec for tier in self.config.tiers],
            piece_bytes=self.config.piece_bytes,
        )
        if writing.pieces > 1:
            for reader in self._readers:
                reader.most_pieces = max(reader.most_pieces, writing.pieces)
        stored = size + (HEAD_BYTES + (TAG_BYTES if self._ring.encrypts else 0)) * writing.pieces

        def outcome(effect: TierEffect) -> StoreOutcome:
            assert isinstance(effect, SaveFinished)
            return StoreOutcome(dict(zip(self._names, effect.outcomes, strict=True)), self._ms_since(began_s))

        asked = self._host.ask(
            "save", lambda number: SaveAsked(number, owner.tag + key, stored, writing.pieces), carry=writing
        )
        return _then(asked, outcome)

    def store(
        self, namespace: Namespace, key: bytes, shape: ChunkShape, parts: Sequence[Buffer], *, start_token: int = 0
    ) -> StoreOutcome:
        """Write, verify, commit, announce; in every tier that the write policies name."""
        return self.store_async(namespace, key, shape, parts, start_token=start_token).result()

    def delete(self, namespace: Namespace, keys: Sequence[bytes], *, why: str = "asked") -> dict[str, int | None]:
        """Delete everywhere. None: that tier does not answer now and is asked again when it does."""
        owner = self._owner(namespace)
        names = tuple(owner.tag + key for key in keys)
        effect = self._host.ask("removal", lambda number: RemovalAsked(number, names, why)).result()
        assert isinstance(effect, RemovalFinished)
        return dict(zip(self._names, effect.counts, strict=True))

    def warm(self, namespace: Namespace, keys: Sequence[bytes], shape: ChunkShape) -> None:
        """Bring chunks into the nearest tier in the background."""
        owner = self._owner(namespace)
        self._host.post(WarmAsked(tuple(owner.tag + key for key in keys), shape.payload_bytes))

    def announce_contract(
        self, contract: Contract, *, compared: Callable[[tuple[str, ...]], None] = lambda differs: None
    ) -> None:
        """Leave the contract in every tier that others read, in the background; what fails is not tried again.
        `compared` hears, per tier, in which members the most similar contract of others there differs, if there is
        one."""

        def leave_and_compare(store: Store) -> None:
            write_contract(store, contract, deadline_s=SCAN_DEADLINE_S)
            compared(nearest_difference(store, contract, deadline_s=SCAN_DEADLINE_S))

        self._host.aside(leave_and_compare)

    def reconcile(self, *, late: bool = True) -> None:
        """Look through the tiers with an index, in the background: what others wrote there is known from then on, and
        counted as unannounced unless this is the first time."""
        for i, tier in enumerate(self.config.tiers):
            if tier.index:
                self._host.by_crew(i, partial(self._find, i, late=late))

    # --- what is known -----------------------------------------------------------------------------------------------

    def observe_prefill(self, tokens: int, ms: float) -> None:
        """The engine computed so many tokens in that time; break-even learns from it."""
        self._host.post(PrefillSeen(tokens, ms / 1000))

    def observe_fetch(self, bytes_by_tier: Mapping[str, int], ms_by_tier: Mapping[str, float]) -> None:
        """Another process fetched with the same configuration, as its outcome says; for one that only looks up."""
        for i, name in enumerate(self._names):
            if bytes_by_tier.get(name):
                self._host.post(FetchSeen(i, bytes_by_tier[name], ms_by_tier[name] / 1000))

    def report(self) -> dict[str, Any]:
        """Counters since the start, and the state of every tier."""

        def look(machine: TierMachine) -> dict[str, Any]:
            shared = machine.shared
            tiers = {
                self._names[tier.index]: {
                    "medium": tier.settings.medium.value,
                    "in_use": tier.in_use,
                    "times_out_of_use": tier.breaker.times_opened,
                    "used_bytes": tier.ledger.used_bytes if tier.settings.capacity_bytes is not None else None,
                    "capacity_bytes": tier.settings.capacity_bytes,
                    "fetches_running": tier.reads.running,
                    "writes_waiting": len(tier.writes.waiting),
                    "bytes_per_s": tier.rate.bytes_per_s(),
                    "unannounced_objects": tier.unannounced if tier.settings.index else None,
                    "last_refusal": self._readers[tier.index].last_refusal,
                }
                for tier in shared.tiers
            }
            return {
                "tiers": tiers,
                "ops": [
                    {"tier": self._names[i], "op": op, "outcome": outcome.value, "count": count}
                    for (i, op, outcome), count in shared.counts.items()
                ],
                "bytes": [
                    {"tier": self._names[i], "direction": direction, "bytes": moved}
                    for (i, direction), moved in shared.bytes_moved.items()
                ],
                "phantoms": shared.phantoms,
            }

        report = self._host.inspect(look)
        assert isinstance(report, dict)
        return report

    @property
    def under_way(self) -> int:
        """Look-ups, loads, saves and deletions that have no answer yet."""
        return self._host.under_way

    def check(self) -> None:
        """Invariants; for tests and drills."""
        self._host.inspect(TierMachine.check)

    def metrics(self) -> list[str]:
        """Lines of Prometheus text for whatever page this process has."""
        return [*counter_lines(self.report()), *self._times.lines()]

    def close(self) -> None:
        """Running writes end first; what waits is given up, and whoever waits for it gets StoreUnavailable."""
        if self._reconciling is not None:
            self._reconciling.stop()
        self._host.close()

    # --- parts -------------------------------------------------------------------------------------------------------

    def _open_tier(self, index: int, given: Store | None) -> HostTier:
        tier = self.config.tiers[index]
        store = given or open_store(tier.url, capacity_bytes=tier.bytes, deadline_s=self._deadline_s)
        reader = Reader(
            store, ring=self._ring, codec=tier.codec, piece_bytes=self.config.piece_bytes, wall_s=self._runtime.wall_s
        )
        self._readers.append(reader)
        inline = store.kind == "memory"
        hands = tier.max_fetches + tier.max_writes + 2
        ttl_s = min((ttl for ttl in (tier.ttl_s, self.config.ttl_s) if ttl is not None), default=None)
        return HostTier(self._names[index], store, reader, inline, ttl_s, hands)

    def _count_what_is_there(self, tiers: Sequence[HostTier]) -> None:
        """What lay in a tier with a limit before this process came counts and is evicted like the rest."""
        for i, tier in enumerate(tiers):
            if self.config.tiers[i].bytes is None or tier.store.kind not in ("memory", "file"):
                continue
            try:
                self._find(i, tier.store, late=False)
            except StoreError:
                continue

    def _find(self, index: int, store: Store, *, late: bool) -> None:
        """Tell the machine what lies in a tier. Raises StoreError."""
        now_s = self._runtime.wall_s()
        found = [
            (info.key, info.stored_bytes, max(0.0, now_s - (info.modified_s or now_s)))
            for info in store.scan(deadline_s=SCAN_DEADLINE_S)
        ]
        found.sort(key=lambda object_: -object_[2])
        self._host.post(ObjectsFound(index, tuple(found), late))

    def _reconcile_now_and_then(self) -> None:
        assert self._reconciling is not None
        self.reconcile()
        self._reconciling.set(self._runtime.now_s() + self.config.reconcile_s)

    def _ms_since(self, began_s: float) -> float:
        return (self._runtime.now_s() - began_s) * 1000

    def _owner(self, namespace: Namespace) -> Owner:
        name = (namespace.tenant, namespace.tenant_key, namespace.epoch)
        owner = self._owners.get(name)
        if owner is None:
            if len(self._owners) >= 4096:
                self._owners.clear()
            owner = self._owners[name] = owner_of(namespace)
        return owner

    def _wanted(self, plan: LookupPlan, owner: Owner, key: bytes) -> Wanted:
        expected = Expected(
            contract_digest=plan.namespace.contract_digest,
            key=key,
            tenant_tag=owner.tag,
            epoch=plan.namespace.epoch,
            plain_bytes=plan.shape.payload_bytes,
            dtype=plan.shape.dtype,
        )
        return Wanted(owner.tag + key, expected, owner)


def owner_of(namespace: Namespace) -> Owner:
    """A tenant's tag is keyed with its secret: it groups the tenant's objects and does not say whose they are."""
    fields = [("tag", namespace.tenant.encode())]
    tag = keyed_digest(namespace.tenant_key[:64], fields, digest_bytes=TAG_OF_TENANT_BYTES)
    return Owner(tag, namespace.tenant_key, namespace.epoch)


def _then(future: Future[TierEffect], make: Callable[[TierEffect], Answer]) -> Future[Answer]:
    """A future with what `make` makes of the effect."""
    made: Future[Answer] = Future()

    def pass_on(done: Future[TierEffect]) -> None:
        error = done.exception()
        if error is None:
            made.set_result(make(done.result()))
        else:
            made.set_exception(error)

    future.add_done_callback(pass_on)
    return made
