"""Engine versions that kvrelay was held against, and what kinds of engine can publish KV events."""

from __future__ import annotations

from msgspec import Struct

# engine -> beginnings of the versions that tests ran against real servers of; the mock is our own and always known
TESTED: dict[str, tuple[str, ...]] = {
    "vllm": ("0.32.0",),
    "llamacpp": ("b11549",),
    "mock": (),
}
PUBLISHES_EVENTS = frozenset(("vllm", "sglang", "mock"))
METRICS_WANTED = ("running_requests", "waiting_requests", "prefix_queries_tokens", "prefix_hits_tokens")
"""Canonical metrics that routing and the check for silent events read."""

SCORES_BY_CACHE = frozenset(("cache_load",))
"""Policies that are worth nothing without an index."""


class KvPair(Struct, frozen=True):
    """What moves KV and the engine that it was tried in, by the beginnings of their versions, and what came of it."""

    mover: str
    mover_versions: tuple[str, ...]
    engine: str
    engine_versions: tuple[str, ...]
    verdict: str


KV_PAIRS = (KvPair("kvrelay", ("0.1.",), "vllm", ("0.32.0",), "tested, loaded KV equals computed KV"),)
NEVER_TRIED = "never tried together"
