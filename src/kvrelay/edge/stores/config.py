"""What a `[store]` section, a connector's options or a command's flags come down to, and the stores it names."""

from __future__ import annotations

import difflib
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

import msgspec
from msgspec import Struct

from kvrelay.core.model.units import Tier
from kvrelay.core.tiers.settings import Eviction, FailurePolicy, Promotion, TierSettings, TiersSettings, WritePolicy
from kvrelay.edge.stores.file import FileStore
from kvrelay.edge.stores.memory import MemoryStore
from kvrelay.edge.stores.mooncake import MooncakeStore
from kvrelay.edge.stores.peer import PeerStore
from kvrelay.edge.stores.s3 import S3Store, credentials
from kvrelay.edge.stores.shm import shared_memory
from kvrelay.edge.stores.store import Store
from kvrelay.edge.stores.valkey import ValkeyStore

_LEAST_S3_TIMEOUT_S = 0.25  # of the client, whose time-out is one for all calls; requests have their own deadline
_KINDS = {"valkeys": "valkey", "redis": "valkey", "rediss": "valkey"}
_MOONCAKE_SEGMENT_BYTES = 1 << 30  # of this process's memory, given to all clients
DEFAULT_PORTS = {"valkey": 6379, "valkeys": 6379, "redis": 6379, "rediss": 6379, "peer": 8200}


class StoreConfigError(ValueError):
    """The configuration of the store cannot be used; the message says what was given and what is legal."""


class TierConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tier. `url` as in the user guide; everything else has a default."""

    url: str
    kind: str = ""  # stated only to be checked: the URL says it
    name: str = ""
    bytes: int | None = None
    ttl_s: float | None = None
    eviction: Eviction = "lru"
    write: WritePolicy = "through"
    promote: Promotion = "always"
    codec: Literal["raw", "zstd", "lz4", "fp8"] = "raw"
    max_fetches: int = 8
    max_writes: int = 4
    index: bool = False


class StoreConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All tiers, nearest first, and what holds for all of them."""

    tiers: tuple[TierConfig, ...]
    failure_policy: FailurePolicy = "recompute"
    deadline_ms: float = 50.0
    break_even: bool = True
    probe_interval_s: float = 5.0
    sample_interval_s: float = 5.0
    keys: str = "none"  # none, file:PATH, env:NAME, command:PROGRAM ARGUMENTS
    cipher: Literal["aes-256-gcm", "aegis-256x2"] = "aes-256-gcm"  # of new objects
    ttl_s: float | None = None  # of every object, written into it
    piece_bytes: int = 4 * 1024 * 1024
    reconcile_s: float = 60.0

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any], *, source: str) -> StoreConfig:
        """From outside data; StoreConfigError names what is wrong and the nearest legal name."""
        try:
            config = msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            raise StoreConfigError(f"store configuration (from {source}): {error}{_hint(str(error))}") from None
        for tier in config.tiers:
            scheme = urlsplit(tier.url).scheme
            if tier.kind and tier.kind != _KINDS.get(scheme, scheme):
                raise StoreConfigError(f"tier `{tier.url}` is no `{tier.kind}` store (from {source})")
        return config

    def tier_names(self) -> tuple[str, ...]:
        """One distinct name per tier, for metrics and messages."""
        names: list[str] = []
        for tier in self.tiers:
            name = tier.name or urlsplit(tier.url).scheme
            while name in names:
                name += "-2"
            names.append(name)
        return tuple(names)

    def settings(self) -> TiersSettings:
        """The machine's view."""
        return TiersSettings(
            tiers=tuple(
                TierSettings(
                    name=name,
                    medium=medium_of(tier.url),
                    capacity_bytes=tier.bytes,
                    ttl_s=tier.ttl_s,
                    eviction=tier.eviction,
                    write=tier.write,
                    promote=tier.promote,
                    max_fetches=tier.max_fetches,
                    max_writes=tier.max_writes,
                    index=tier.index,
                )
                for name, tier in zip(self.tier_names(), self.tiers, strict=True)
            ),
            failure_policy=self.failure_policy,
            break_even=self.break_even,
            probe_interval_s=self.probe_interval_s,
            sample_interval_s=self.sample_interval_s,
        )


def medium_of(url: str) -> Tier:
    """The medium behind a store URL."""
    scheme = urlsplit(url).scheme
    if scheme == "memory":
        return Tier.CPU
    if scheme == "file":
        return Tier.DISK
    return Tier.PEER if scheme == "peer" else Tier.REMOTE


def open_store(url: str, *, capacity_bytes: int | None = None, deadline_s: float = 2.0) -> Store:
    """The store that a URL names. Remote ones connect when first used: an absent server stops nobody's start."""
    parts = urlsplit(url)
    opener = OPENERS.get(parts.scheme)
    if opener is None:
        known = ", ".join(sorted(OPENERS))
        near = difflib.get_close_matches(parts.scheme, OPENERS, n=1)
        hint = f" (did you mean `{near[0]}://`?)" if near else ""
        raise StoreConfigError(f"`{url}` is no store; known kinds: {known}{hint}")
    query = {name: values[-1] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
    return opener(parts, query, capacity_bytes, deadline_s)


Opener = Callable[[SplitResult, dict[str, str], int | None, float], Store]


def _memory(url: SplitResult, query: dict[str, str], capacity_bytes: int | None, deadline_s: float) -> Store:
    if url.netloc:
        return shared_memory(url.netloc, capacity_bytes=capacity_bytes)
    return MemoryStore(capacity_bytes=capacity_bytes)


def _file(url: SplitResult, query: dict[str, str], capacity_bytes: int | None, deadline_s: float) -> Store:
    if url.netloc or not url.path.startswith("/"):
        raise StoreConfigError(f"`{url.geturl()}` names no absolute path; legal: file:///DIR")
    return FileStore(Path(unquote(url.path)), capacity_bytes=capacity_bytes, sync=query.get("sync") == "1")


def _valkey(url: SplitResult, query: dict[str, str], capacity_bytes: int | None, deadline_s: float) -> Store:
    if url.password:
        raise StoreConfigError("a password in a store's URL would show up in logs; use ?password_file=PATH")
    database = url.path.strip("/") or "0"
    if not url.hostname or not database.isdigit():
        raise StoreConfigError(f"`{url.geturl()}` is not valkey://HOST:PORT/DB")
    return ValkeyStore(
        url.hostname,
        url.port or DEFAULT_PORTS[url.scheme],
        database=int(database),
        cluster=query.get("cluster") == "1",
        username=url.username,
        password=_secret(query.get("password_file")),
        tls=ssl.create_default_context(cafile=query.get("ca")) if url.scheme in ("valkeys", "rediss") else None,
    )


def _s3(url: SplitResult, query: dict[str, str], capacity_bytes: int | None, deadline_s: float) -> Store:
    if not url.netloc:
        raise StoreConfigError(f"`{url.geturl()}` is not s3://BUCKET/PREFIX?endpoint=URL")
    access_key, secret_key = credentials()
    return S3Store(
        url.netloc,
        url.path.strip("/"),
        endpoint=query.get("endpoint"),
        region=query.get("region", "us-east-1"),
        timeout_s=max(deadline_s, _LEAST_S3_TIMEOUT_S),
        access_key=access_key,
        secret_key=secret_key,
    )


def _peer(url: SplitResult, query: dict[str, str], capacity_bytes: int | None, deadline_s: float) -> Store:
    if not url.hostname:
        raise StoreConfigError(f"`{url.geturl()}` is not peer://HOST:PORT")
    return PeerStore(
        url.hostname,
        url.port or DEFAULT_PORTS["peer"],
        token=_secret(query.get("token_file")),
        tls=ssl.create_default_context(cafile=query.get("ca")) if query.get("tls") == "1" else None,
    )


def _mooncake(url: SplitResult, query: dict[str, str], capacity_bytes: int | None, deadline_s: float) -> Store:
    if not url.hostname or not url.port:
        raise StoreConfigError(f"`{url.geturl()}` is not mooncake://HOST:PORT of a master")
    return MooncakeStore(
        url.hostname,
        url.port,
        local_host=query.get("local", "127.0.0.1"),
        segment_bytes=capacity_bytes or int(query.get("segment_bytes", _MOONCAKE_SEGMENT_BYTES)),
        admin_url=f"http://{url.hostname}:{query['admin']}" if "admin" in query else None,
        protocol=query.get("protocol", "tcp"),
    )


OPENERS: dict[str, Opener] = {
    "memory": _memory,
    "file": _file,
    "valkey": _valkey,
    "valkeys": _valkey,
    "redis": _valkey,
    "rediss": _valkey,
    "s3": _s3,
    "peer": _peer,
    "mooncake": _mooncake,
}


def _secret(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise StoreConfigError(f"cannot read {path}: {error.strerror}") from error


def _hint(message: str) -> str:
    """What would be legal, and the nearest of it, for what msgspec complains about."""
    section = TierConfig if "$.tiers[" in message else StoreConfig
    if "unknown field `" in message:
        given = message.split("unknown field `", 1)[1].split("`", 1)[0]
        legal = list(section.__struct_fields__)
    elif "Invalid enum value '" in message:
        given = message.split("Invalid enum value '", 1)[1].split("'", 1)[0]
        field = message.rpartition(".")[2].rstrip("`")
        legal = list(get_args(get_type_hints(section)[field]))
    else:
        return ""
    near = difflib.get_close_matches(given, legal, n=1)
    return f"; legal: {', '.join(legal)}" + (f" (did you mean `{near[0]}`?)" if near else "")
