"""Reads an LMCache configuration field by field: what each becomes here, what is not needed, what is refused and why.

Nothing is dropped silently. A field that is unknown is refused, because it may be the one that somebody relies on; so
is a value that would put the machine at risk, or that stands for something that we do not do.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvrelay.edge.connectors.lmcache.environment import looks_like_environment, read_environment
from kvrelay.edge.connectors.lmcache.fields import NOT_NEEDED, ONLY_WITH_A_SWITCH, REFUSED_WHEN_ON, REFUSED_WHEN_SET
from kvrelay.edge.connectors.lmcache.remote import RemoteRefused, store_url
from kvrelay.edge.connectors.lmcache.verdict import Host, Reading, Verdict

DEFAULTS: Mapping[str, Any] = {
    "chunk_size": 256,
    "local_cpu": True,
    "max_local_cpu_size": 5.0,
    "local_disk": None,
    "max_local_disk_size": 0.0,
    "remote_url": None,
    "remote_serde": "naive",
    "save_decode_cache": False,
    "cache_policy": "LRU",
    "blocking_timeout_secs": 10,
    "lookup_timeout_ms": 3000,
}
_POLICIES = {"LRU": "lru", "LFU": "lfu", "S3FIFO": "s3fifo"}
_PLAIN_SERDES = ("naive", "torch", "safetensor", "fast")
_GIB = 1 << 30


class Unreadable(ValueError):
    """The file is no LMCache configuration; the message says why."""


def read_file(file: Path) -> Mapping[str, Any]:
    """YAML, or lines that set LMCACHE_... variables. Raises Unreadable, or OSError."""
    try:
        import yaml
    except ModuleNotFoundError:
        raise Unreadable("reading YAML needs an extra: pip install 'kvrelay[lmcache]'") from None
    try:
        text = file.read_text(encoding="utf-8")
        if looks_like_environment(text):
            return read_environment(text, yaml.safe_load)
        content = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as fault:
        where = getattr(fault, "problem_mark", None)
        line = "" if where is None else f" at line {where.line + 1}"
        raise Unreadable(f"{file} is not YAML{line}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise Unreadable(f"{file} is not a mapping of names to values")
    return content


def read(given: Mapping[str, Any], host: Host) -> Reading:
    """Judges every field that is given, and those that LMCache would have set to a default that matters."""
    reader = _Reader(given, host)
    verdicts = [reader.judge(name, value) for name, value in given.items()]
    verdicts += [reader.judge(name, DEFAULTS[name]) for name in DEFAULTS if name not in given]
    return Reading(tuple(verdicts), reader.store(), reader.connector())


class _Reader:
    def __init__(self, given: Mapping[str, Any], host: Host) -> None:
        self._given = given
        self._host = host
        self._tiers: dict[str, dict[str, Any]] = {}  # by what they come from: cpu, disk, remote
        self._eviction = "lru"
        self._deadline_ms: float | None = None
        self._connector: dict[str, Any] = {}
        self._own: dict[str, Callable[[Any], Verdict]] = {
            "chunk_size": self._chunk_size,
            "local_cpu": self._local_cpu,
            "max_local_cpu_size": self._max_local_cpu_size,
            "local_disk": self._local_disk,
            "max_local_disk_size": self._max_local_disk_size,
            "remote_url": self._remote_url,
            "remote_serde": self._remote_serde,
            "save_decode_cache": self._save_decode_cache,
            "cache_policy": self._cache_policy,
            "blocking_timeout_secs": self._blocking_timeout_secs,
            "lookup_timeout_ms": self._lookup_timeout_ms,
        }

    def store(self) -> dict[str, Any]:
        tiers = [self._tiers[name] for name in ("cpu", "disk", "remote") if name in self._tiers]
        for tier in tiers:
            if tier.get("bytes") is not None:
                tier["eviction"] = self._eviction
        deadline = {} if self._deadline_ms is None else {"deadline_ms": self._deadline_ms}
        return {"failure_policy": "recompute", **deadline, "tiers": tiers}

    def connector(self) -> dict[str, Any]:
        return dict(self._connector)

    def judge(self, name: str, value: Any) -> Verdict:
        if name in self._own:
            return self._own[name](value)
        if name in REFUSED_WHEN_ON:
            if value is False or value is None:
                return Verdict(name, value, "not needed", "off, as it has to be")
            return Verdict(name, value, "refused", REFUSED_WHEN_ON[name])
        if name in REFUSED_WHEN_SET:
            if value in (None, [], {}, ""):
                return Verdict(name, value, "not needed", "not set")
            return Verdict(name, value, "refused", REFUSED_WHEN_SET[name])
        if name in NOT_NEEDED:
            return Verdict(name, value, "not needed", NOT_NEEDED[name])
        if name.startswith(ONLY_WITH_A_SWITCH):
            return Verdict(name, value, "not needed", "does something only together with a switch that is off")
        known = [*self._own, *REFUSED_WHEN_ON, *REFUSED_WHEN_SET, *NOT_NEEDED]
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        hint = f"; did you mean `{nearest[0]}`?" if nearest else ""
        return Verdict(name, value, "refused", f"unknown, so nobody can say what depends on it{hint}")

    # --- fields that have a counterpart ------------------------------------------------------------------------------

    def _chunk_size(self, value: Any) -> Verdict:
        if not _whole(value) or not 1 <= value <= 4096:
            return _refused("chunk_size", value, "a whole number of tokens from 1 to 4096")
        self._connector["chunk_tokens"] = value
        note = f"up to {value - 1} tokens at the end of a prompt are computed on every hit"
        note += "; it must be a multiple of the engine's block size, and 0 chooses a small one" if value >= 128 else ""
        return Verdict("chunk_size", value, "taken", note, f"chunk_tokens = {value}")

    def _local_cpu(self, value: Any) -> Verdict:
        if not isinstance(value, bool):
            return _refused("local_cpu", value, "true or false")
        if not value:
            return Verdict("local_cpu", value, "taken", "no tier in host memory", "no memory:// tier")
        size = self._given.get("max_local_cpu_size", DEFAULTS["max_local_cpu_size"])
        if _number(size) and 0 < size <= self._host.room_gib / self._host.workers:
            self._tiers["cpu"] = {"url": "memory://kvrelay", "bytes": int(size * _GIB)}
        return Verdict(
            "local_cpu", value, "taken", "host memory, shared by all workers of the host", 'url = "memory://kvrelay"'
        )

    def _max_local_cpu_size(self, value: Any) -> Verdict:
        name, host = "max_local_cpu_size", self._host
        if not _number(value) or value < 0:
            return _refused(name, value, "a number of GB, 0 or more")
        if self._given.get("local_cpu", DEFAULTS["local_cpu"]) is False:
            return Verdict(name, value, "not needed", "there is no tier in host memory")
        if value == 0:
            return _refused(name, value, "more than 0: a tier that may hold nothing; say `local_cpu: false` instead")
        if value * host.workers > host.room_gib:
            wanted = f"{value:g} GiB" if host.workers == 1 else f"{host.workers} x {value:g} GiB"
            return Verdict(
                name,
                value,
                "refused",
                f"{wanted} of cache do not fit: this host has {host.memory_gib:g} GiB, of which the engine takes "
                f"{host.workers * host.engine_gib:g} and {host.buffer_gib:g} stay free as a buffer; at most "
                f"{max(0.0, host.room_gib / host.workers):.1f} GiB",
            )
        size = int(value * _GIB)
        return Verdict(name, value, "taken", f"{host.room_gib:.1f} GiB would fit", f"bytes = {size}")

    def _local_disk(self, value: Any) -> Verdict:
        if value in (None, "", False):
            return Verdict("local_disk", value, "taken", "no tier on disk", "no file:// tier")
        path = str(value).removeprefix("file://")
        if not path.startswith("/") or "," in path:
            return _refused("local_disk", value, "one absolute path")
        size = self._given.get("max_local_disk_size", DEFAULTS["max_local_disk_size"])
        if _number(size) and size > 0:
            self._tiers["disk"] = {"url": f"file://{path}", "bytes": int(size * _GIB)}
        return Verdict("local_disk", value, "taken", "one file per chunk, written atomically", f'url = "file://{path}"')

    def _max_local_disk_size(self, value: Any) -> Verdict:
        name = "max_local_disk_size"
        if not _number(value) or value < 0:
            return _refused(name, value, "a number of GB, 0 or more")
        if self._given.get("local_disk") in (None, "", False):
            return Verdict(name, value, "not needed", "there is no tier on disk")
        if value == 0:
            return _refused(name, value, "more than 0: a tier on disk without a bound fills the disk")
        return Verdict(name, value, "taken", "also counts what lies there already", f"bytes = {int(value * _GIB)}")

    def _remote_url(self, value: Any) -> Verdict:
        if value in (None, ""):
            return Verdict("remote_url", value, "taken", "nothing is shared between hosts", "no remote tier")
        try:
            url = store_url(str(value))
        except RemoteRefused as reason:
            return Verdict("remote_url", value, "refused", str(reason))
        self._tiers["remote"] = {"url": url}
        return Verdict("remote_url", value, "taken", "asked after the local tiers", f'url = "{url}"')

    def _remote_serde(self, value: Any) -> Verdict:
        if value is None or value in _PLAIN_SERDES:
            return Verdict("remote_serde", value, "taken", "bytes as they are, with a checksum", 'codec = "raw"')
        if value in ("cachegen", "kivi"):
            return Verdict("remote_serde", value, "refused", "loses precision without a stated bound; `fp8` has one")
        return _refused("remote_serde", value, ", ".join(_PLAIN_SERDES))

    def _save_decode_cache(self, value: Any) -> Verdict:
        if not isinstance(value, bool):
            return _refused("save_decode_cache", value, "true or false")
        self._connector["save_generated"] = value
        note = "what was generated is there for the next turn" if value else "the next turn computes the answer again"
        becomes = f"save_generated = {str(value).lower()}"
        return Verdict("save_decode_cache", value, "taken", note, becomes)

    def _cache_policy(self, value: Any) -> Verdict:
        policy = _POLICIES.get(str(value).upper().replace("-", ""))
        if policy is None:
            return _refused("cache_policy", value, ", ".join(_POLICIES))
        self._eviction = policy
        return Verdict("cache_policy", value, "taken", "of tiers with a size", f'eviction = "{policy}"')

    def _blocking_timeout_secs(self, value: Any) -> Verdict:
        name = "blocking_timeout_secs"
        if name not in self._given:
            return Verdict(name, value, "not needed", "10 s would be waited for a store that hangs; ours is shorter")
        if not _number(value) or value <= 0:
            return _refused(name, value, "a number of seconds above 0")
        self._deadline_ms = value * 1000
        return Verdict(name, value, "taken", "a store that hangs costs this once", f"deadline_ms = {value * 1000}")

    def _lookup_timeout_ms(self, value: Any) -> Verdict:
        name = "lookup_timeout_ms"
        if name not in self._given:
            return Verdict(name, value, "not needed", "3 s would be waited for a look-up; ours is shorter")
        if not _number(value) or value <= 0:
            return _refused(name, value, "a number of milliseconds above 0")
        self._connector["lookup_deadline_ms"] = value
        return Verdict(name, value, "taken", "then the prompt is computed", f"lookup_deadline_ms = {value}")


def _refused(name: str, value: Any, legal: str) -> Verdict:
    return Verdict(name, value, "refused", f"legal: {legal}")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value and abs(value) < 1e9
