"""What the connector asks of a store, and the tiered store behind that question.

Calls may take as long as the store's own deadlines; none of them raises for what the world does.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct, structs

from kvrelay.core.contract.identity import Namespace
from kvrelay.core.tiers.outcome import Outcome
from kvrelay.edge.connectors.vllm.kv.settings import Settings, SettingsError
from kvrelay.edge.stores.config import StoreConfig, StoreConfigError
from kvrelay.edge.stores.keys import KeyRingError
from kvrelay.edge.stores.tiered import ChunkShape, TieredStore

Places = tuple[int, ...]
"""Tiers that said they have a chunk, by number, the nearest first."""


class Found(Struct, frozen=True):
    """Leading chunks that are probably there, and whether loading them beats computing them."""

    chunks: int
    worthwhile: bool = True
    fetch_ms: float | None = None  # predicted
    recompute_ms: float | None = None  # predicted
    places: tuple[Places, ...] = ()  # of each of these chunks
    owed: bool = False  # a tier did not answer, and by the failure policy that is an error and no miss


class Fetched(Struct, frozen=True):
    """`outcomes` has one word per chunk asked for; a chunk's bytes may be used only where it is `hit`."""

    outcomes: tuple[str, ...]
    ms: float
    bytes_by_tier: Mapping[str, int] = {}
    ms_by_tier: Mapping[str, float] = {}
    scopes: tuple[str | None, ...] = ()  # per chunk: how far a `hit` came, see `edge/stores/scope.py`


class ChunkStore(Protocol):
    def lookup(self, namespace: Namespace, keys: Sequence[bytes], shape: ChunkShape) -> Found:
        """Asks which leading chunks are there. An estimate: only a verified fetch is a hit."""
        ...

    def fetch(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        places: Sequence[Places],
        shape: ChunkShape,
        into: Sequence[memoryview],
    ) -> Fetched:
        """Reads from where the look-up found it, decrypts and verifies. The buffers hold whatever was read: use only
        what is a `hit`."""
        ...

    def save(
        self, namespace: Namespace, key: bytes, shape: ChunkShape, payload: memoryview, *, first_token: int
    ) -> str:
        """Writes one chunk and answers with its outcome. The payload may change once this has returned."""
        ...

    def observe_prefill(self, tokens: int, ms: float) -> None:
        """Tells the break-even how fast this engine computes."""
        ...

    def observe_fetch(self, bytes_by_tier: Mapping[str, int], ms_by_tier: Mapping[str, float]) -> None:
        """Tells the break-even what a fetch of the worker's process took."""
        ...

    def close(self) -> None: ...


def open_store(settings: Settings) -> SharedTiers:
    """Raises SettingsError. A server that is not there now stops nobody's start."""
    try:
        section, source = _section(settings)
        config = StoreConfig.from_mapping(section, source=source)
        return SharedTiers(TieredStore.open(config), fails=config.failure_policy == "fail")
    except (StoreConfigError, KeyRingError) as fault:
        raise SettingsError(str(fault)) from fault


def _section(settings: Settings) -> tuple[Mapping[str, Any], str]:
    if settings.store is not None:
        return settings.store, "kv_connector_extra_config"
    assert settings.config is not None
    file = Path(settings.config).expanduser()
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as fault:
        raise SettingsError(f"`config` {file}: {fault.strerror}") from fault
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as fault:
        raise SettingsError(f"`config` {file} is not TOML: {fault}") from fault
    section = content.get("store")
    if not isinstance(section, dict):
        raise SettingsError(f"`config` {file} has no section [store]")
    tiers = section.get("tiers")
    if isinstance(tiers, list):  # `kind` may be there; the URL says it as well
        section["tiers"] = [{key: tier[key] for key in tier if key != "kind"} for tier in tiers]
    return section, str(file)


class SharedTiers:
    """The tiered store, for chunks of one shape."""

    def __init__(self, store: TieredStore, *, fails: bool = False) -> None:
        """`fails`: the failure policy is `fail`."""
        self._store = store
        self._fails = fails

    def lookup(self, namespace: Namespace, keys: Sequence[bytes], shape: ChunkShape) -> Found:
        plan = self._store.lookup(namespace, keys, shape)
        there = len(plan.keys)
        return Found(
            chunks=there,
            worthwhile=plan.fetch or not there,
            fetch_ms=plan.predicted_fetch_ms,
            recompute_ms=plan.predicted_recompute_ms,
            places=plan.places,
            owed=self._fails and bool(plan.unasked),
        )

    def fetch(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        places: Sequence[Places],
        shape: ChunkShape,
        into: Sequence[memoryview],
    ) -> Fetched:
        plan = structs.replace(self._store.plan(namespace, keys, shape), places=tuple(places))
        outcome = self._store.fetch(plan, into)
        words = tuple(word.value for word in outcome.outcomes)
        scopes = tuple(None if scope is None else scope.value for scope in outcome.scopes)
        return Fetched(words, outcome.ms, outcome.bytes_by_tier, outcome.ms_by_tier, scopes)

    def save(
        self, namespace: Namespace, key: bytes, shape: ChunkShape, payload: memoryview, *, first_token: int
    ) -> str:
        outcome = self._store.store(namespace, key, shape, [payload], start_token=first_token)
        if outcome.stored:
            return Outcome.STORED.value
        return next(iter(outcome.by_tier.values()), Outcome.SKIPPED).value

    def observe_prefill(self, tokens: int, ms: float) -> None:
        self._store.observe_prefill(tokens, ms)

    def observe_fetch(self, bytes_by_tier: Mapping[str, int], ms_by_tier: Mapping[str, float]) -> None:
        self._store.observe_fetch(bytes_by_tier, ms_by_tier)

    def close(self) -> None:
        self._store.close()
