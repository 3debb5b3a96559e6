"""What a user sets for the connector, in `kv_connector_extra_config`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct


class SettingsError(ValueError):
    """The settings cannot be used; the message names the key, what was given and what is legal."""


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Units are in the names. Every key has a default except that one of `config` and `store` says where KV goes."""

    config: str | None = None  # a kvrelay.toml, of which the section [store] is read
    store: dict[str, Any] | None = None  # the same section, inline
    tenant: str = "default"
    secret_file: str | None = None  # makes the names of objects unguessable; the same on all workers that share
    epoch: int = 0
    epoch_file: str | None = None  # a text file with a number, read again whenever it changes; it replaces `epoch`
    chunk_tokens: int = 0  # a multiple of the block size; 0: as many blocks as make about 1 MiB, at most 128 tokens
    lookup_deadline_ms: float = 100.0  # how long a request may wait to learn what the store has
    load_threads: int = 2
    save_threads: int = 2
    staging_mb: int = 256
    save_generated: bool = True  # also what was generated, for the next turn of a conversation
    report: str | None = None  # HOST:PORT, where the gateway asks what a request really loaded
    digest_cache: str | None = "~/.cache/kvrelay/digests.json"  # null: nowhere
    contract: dict[str, str] = {}  # fields that the engine does not know, or that are to be stated otherwise


def read_settings(given: Mapping[str, Any]) -> Settings:
    """Raises SettingsError."""
    unknown = [name for name in given if name not in Settings.__struct_fields__]
    if unknown:
        lines = [f"unknown key `{name}` (from `kv_connector_extra_config`){_hint(name)}" for name in unknown]
        raise SettingsError("\n".join([*lines, f"  known keys: {', '.join(Settings.__struct_fields__)}"]))
    try:
        settings = msgspec.convert(dict(given), Settings)
    except msgspec.ValidationError as fault:
        raise SettingsError(f"`kv_connector_extra_config`: {fault}") from fault
    if (settings.config is None) == (settings.store is None):
        raise SettingsError("`kv_connector_extra_config` needs exactly one of `config` (a kvrelay.toml) and `store`")
    for name in ("load_threads", "save_threads", "staging_mb", "lookup_deadline_ms"):
        if getattr(settings, name) <= 0:
            raise SettingsError(f"`{name}` is {getattr(settings, name)}: it must be more than 0")
    if settings.chunk_tokens < 0:
        raise SettingsError(f"`chunk_tokens` is {settings.chunk_tokens}: it must be 0 or a multiple of the block size")
    return settings


def secret_of(settings: Settings) -> bytes:
    """The secret from its file, or nothing. Raises SettingsError."""
    if settings.secret_file is None:
        return b""
    try:
        secret = Path(settings.secret_file).expanduser().read_bytes().strip()
    except OSError as fault:
        raise SettingsError(f"`secret_file` {settings.secret_file}: {fault.strerror}") from fault
    if len(secret) < 16:
        raise SettingsError(f"`secret_file` {settings.secret_file} holds {len(secret)} bytes: at least 16 are needed")
    return secret


def chunk_blocks(settings: Settings, *, block_size_tokens: int, block_bytes: int) -> int:
    """Blocks per chunk. `block_bytes`: all layers of one block. Raises SettingsError."""
    if settings.chunk_tokens == 0:
        most = max(1, 128 // block_size_tokens)
        return min(most, max(1, -(-(1 << 20) // max(1, block_bytes))))
    if settings.chunk_tokens % block_size_tokens:
        raise SettingsError(
            f"`chunk_tokens` is {settings.chunk_tokens}: it must be a multiple of the engine's block size, "
            f"{block_size_tokens} tokens"
        )
    return settings.chunk_tokens // block_size_tokens


class Epochs:
    """The epoch that holds now."""

    def __init__(self, settings: Settings) -> None:
        self._epoch = settings.epoch
        self._file = None if settings.epoch_file is None else Path(settings.epoch_file).expanduser()
        self._seen: tuple[int, int] | None = None

    def now(self) -> int:
        """Raises OSError or ValueError when the file cannot be understood: a guess could revive what was revoked."""
        if self._file is not None:
            found = self._file.stat()
            seen = (found.st_mtime_ns, found.st_ino)
            if seen != self._seen:
                self._epoch = int(self._file.read_text())
                self._seen = seen
        return self._epoch


def _hint(name: str) -> str:
    nearest = difflib.get_close_matches(name, Settings.__struct_fields__, n=1)
    return f"\nhint: did you mean `{nearest[0]}`?" if nearest else ""
