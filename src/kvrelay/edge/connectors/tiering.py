"""Which implementation of a KV tier a worker is started with, told from its arguments.

One at a time: where two are on, nobody can tell which of them made it faster, slower or wrong, and SGLang refuses to
start. What is known of: SGLang's HiCache and LMCache (read in its 0.5.23), vLLM's KV connectors and native
offloading, and our own store.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

HICACHE, LMCACHE, OFFLOADING, OURS = "HiCache", "LMCache", "vLLM offloading", "kvrelay store"

_FLAGS = {
    "--enable-hierarchical-cache": HICACHE,
    "--enable-hicache": HICACHE,
    "--enable-lmcache": LMCACHE,
    "--lmcache-config-file": LMCACHE,
    "--kv-offloading-size": OFFLOADING,
}
_CONNECTORS = {
    "LMCacheConnectorV1": LMCACHE,
    "LMCacheMPConnector": LMCACHE,
    "OffloadingConnector": OFFLOADING,
    "KvrelayConnector": OURS,
}


class OneTierOnly(ValueError):
    """Two implementations in one arm; the text names both and what to do."""


def implementations(args: Sequence[str], *, has_store: bool = False) -> tuple[str, ...]:
    """All that are on, each once, in the order of the arguments. `has_store`: a `[store]` of ours is given as well."""
    found = [OURS] if has_store else []
    for flag, value in _options(args):
        if flag in _FLAGS:
            found.append(_FLAGS[flag])
        if flag == "--kv-offloading-backend" and value == "lmcache":
            found = [name for name in found if name != OFFLOADING] + [LMCACHE]
        if flag == "--kv-transfer-config":
            found += [_CONNECTORS[name] for name in _connectors(value) if name in _CONNECTORS]
    if LMCACHE in found and _offloads_by_lmcache(args):
        found = [name for name in found if name != OFFLOADING]
    return tuple(dict.fromkeys(found))


def one_only(args: Sequence[str], *, has_store: bool = False, where: str) -> str | None:
    """The one that is on, None if none is. Raises OneTierOnly."""
    found = implementations(args, has_store=has_store)
    if len(found) > 1:
        raise OneTierOnly(
            f"{where} has {' and '.join(found)} on at once: whatever changes could not be put down to either"
        )
    return found[0] if found else None


def _offloads_by_lmcache(args: Sequence[str]) -> bool:
    return ("--kv-offloading-backend", "lmcache") in list(_options(args))


def _options(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """`--flag value` and `--flag=value` alike; underscores are read as hyphens, as vLLM does it."""
    for at, word in enumerate(args):
        if not word.startswith("--"):
            continue
        flag, has_value, value = word.partition("=")
        if not has_value:
            following = args[at + 1] if at + 1 < len(args) else ""
            value = "" if following.startswith("--") else following
        yield flag.replace("_", "-"), value


def _connectors(value: str) -> Iterator[str]:
    """Names in a `--kv-transfer-config`; MultiConnector holds others."""
    try:
        config = json.loads(value)
    except ValueError:
        return
    if isinstance(config, Mapping):
        yield from _named(config)


def _named(config: Mapping[str, Any]) -> Iterator[str]:
    yield str(config.get("kv_connector", ""))
    extra = config.get("kv_connector_extra_config")
    inner = extra.get("connectors", ()) if isinstance(extra, Mapping) else ()
    for one in inner:
        if isinstance(one, Mapping):
            yield from _named(one)
