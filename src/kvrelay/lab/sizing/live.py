"""Break-even from a fleet that runs: prefill rates that its gateway has learned, and a store that is asked now."""

from __future__ import annotations

import os
import statistics
import time

import msgspec
from msgspec import Struct

from kvrelay.core.sizing.breakeven import Link, Prefill
from kvrelay.edge.stores.config import open_store
from kvrelay.edge.stores.store import Store

SMALL_BYTES, LARGE_BYTES = 4 * 1024, 8 * 1024 * 1024
READS = 15
DEADLINE_S = 10.0
PROBE_PREFIX = b"kvrelay-size/"


class _Target(Struct):
    prefill_tokens_per_s: float | None = None
    prefill_rate_samples: int | None = None


class _Worker(Struct):
    name: str
    targets: list[_Target] = []


class _Workers(Struct):
    workers: list[_Worker]


class NotAGateway(Exception):
    """The answer is not that of a gateway's admin port."""


def learned_rates(body: bytes) -> tuple[Prefill, ...]:
    """From the answer of `/admin/workers`: one rate per worker whose prefills were seen, slowest first."""
    try:
        workers = msgspec.json.decode(body, type=_Workers).workers
    except msgspec.DecodeError as problem:
        raise NotAGateway(str(problem)) from problem
    rates = [
        Prefill(worker.name, target.prefill_tokens_per_s, target.prefill_rate_samples)
        for worker in workers
        for target in worker.targets
        if target.prefill_tokens_per_s and target.prefill_rate_samples
    ]
    return tuple(sorted(rates, key=lambda rate: rate.tokens_per_s))


def measure_store(url: str) -> Link:
    """Writes two objects, reads each several times, deletes them. Latency and bandwidth follow from the two medians.

    Raises what `open_store` and the store raise. The store must take objects of 8 MiB.
    """
    store = open_store(url, deadline_s=DEADLINE_S)
    try:
        small_s, large_s = _median_read_s(store, SMALL_BYTES), _median_read_s(store, LARGE_BYTES)
    finally:
        store.close()
    per_byte_s = max(0.0, large_s - small_s) / (LARGE_BYTES - SMALL_BYTES)
    if per_byte_s == 0:  # the small object was no faster: all that is known is how long the large one takes
        return Link(url, LARGE_BYTES / large_s, 0.0)
    return Link(url, 1 / per_byte_s, max(0.0, small_s - SMALL_BYTES * per_byte_s))


def _median_read_s(store: Store, size_bytes: int) -> float:
    key = PROBE_PREFIX + os.urandom(8).hex().encode()
    store.write(key, [os.urandom(size_bytes)], only_if_absent=False, deadline_s=DEADLINE_S)
    buffer = bytearray(size_bytes)
    seconds = []
    try:
        for _ in range(READS):
            began_s = time.perf_counter()
            length = store.read_into(key, [memoryview(buffer)], deadline_s=DEADLINE_S)
            seconds.append(time.perf_counter() - began_s)
            if length != size_bytes:
                raise OSError(f"read {length} bytes of {size_bytes} that were just written")
    finally:
        store.delete([key], deadline_s=DEADLINE_S)
    return statistics.median(seconds)
