"""What do verified loads from a tier cost beside the bare transport?

Each figure is the time that a load through the whole tiered store takes (machine, threads, head, checksum or cipher),
as a multiple of the time that the bare thing takes for the same bytes: a memcpy for the memory tier, our own Valkey
client without objects and checks for the Valkey tier. Both alternate within one run, the median of the ratios counts.
As many threads fetch on either side. Destinations were written to before: a first touch costs more than the copy.

How fast AES-GCM is differs by a factor of three between processors, so beside an encrypted load stands what the raw
client and one bare call of the cipher take together (that seals, which takes it as long as to open).
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from tests.real.store_servers import ServerUnavailable, running, valkey

from bench.figure import Figure
from kvrelay.core.contract.identity import Namespace
from kvrelay.edge.stores.ciphers import CIPHERS, KEY_BYTES, TAG_BYTES
from kvrelay.edge.stores.config import open_store
from kvrelay.edge.stores.keys import KeyRing
from kvrelay.edge.stores.tiered import ChunkShape, TieredStore

ROUND_BYTES = 64 << 20
ROUNDS = 15
THREADS = 2
NAMESPACE = Namespace(b"c" * 32, "bench", b"secret", 0)
RINGS = {name: KeyRing({"k1": b"k" * 32}, cipher=name) for name in CIPHERS}
MIB = 1 << 20
MOST_OF_MEMCPY, MOST_OF_RAW, MOST_ENCRYPTED = 1 / 0.5, 1 / 0.8, 1 / 0.6  # at least 50, 80 and 60 % of the bare speed


def run() -> list[Figure]:
    figures = []
    for size in (MIB, 4 * MIB):
        figures.append(_memory(size, "memory://", "private"))
        figures.append(_memory(size, f"memory://bench-{os.getpid()}", "shared"))
    try:
        with TemporaryDirectory() as folder, running([valkey(Path(folder))]) as (server,):
            for size in (MIB, 4 * MIB, 16 * MIB):
                figures.append(_valkey(size, server.port, KeyRing({}), MOST_OF_RAW if size <= 4 * MIB else None))
                for ring in RINGS.values():
                    figures.append(_valkey(size, server.port, ring, MOST_ENCRYPTED if size <= 4 * MIB else None))
    except ServerUnavailable as reason:
        print(f"no figures for Valkey: {reason}")
    return figures


def _memory(size: int, url: str, name: str) -> Figure:
    store, shape, keys = _filled(url, size, KeyRing({}))
    sources = [np.full(size, n % 251, dtype=np.uint8) for n in range(len(keys))]
    into = [np.ones(size, dtype=np.uint8) for _ in keys]

    def bare() -> None:
        for source, target in zip(sources, into, strict=True):
            np.copyto(target, source)

    ratio, ours, bare_s = _compare(bare, _load(store, shape, keys, into))
    store.close()
    if url != "memory://":
        _remove_shared(url)
    what = f"load from the {name} memory tier, {size // MIB} MiB, times memcpy"
    return _figure(what, ratio, MOST_OF_MEMCPY, ours, bare_s, "memcpy")


def _valkey(size: int, port: int, ring: KeyRing, limit: float | None) -> Figure:
    url = f"valkey://127.0.0.1:{port}"
    store, shape, keys = _filled(url, size, ring)
    raw = open_store(url)
    names = [b"raw" + key for key in keys]
    for n, name in enumerate(names):
        raw.write(name, [np.full(size, n % 251, dtype=np.uint8).data], only_if_absent=False, deadline_s=10)
    into = [np.ones(size, dtype=np.uint8) for _ in keys]
    threads = ThreadPoolExecutor(THREADS)

    def read(n: int) -> None:
        raw.read_into(names[n], [memoryview(into[n])], deadline_s=10)

    def bare() -> None:
        list(threads.map(read, range(len(names))))

    ratio, ours, bare_s = _compare(bare, _load(store, shape, keys, into))
    least = _with_bare_cipher(ring.active_cipher, read, bare, threads, into) if ring.encrypts else None
    raw.delete([info.key for info in raw.scan(deadline_s=10)], deadline_s=10)
    raw.close()
    store.close()
    threads.shutdown()
    how = ring.active_cipher if ring.encrypts else "checksum"
    what = f"load from Valkey, {size // MIB} MiB, {how}, times the raw client"
    beside = "raw client" if least is None else f"raw client; with a bare cipher {least:.2f}x"
    return _figure(what, ratio, limit, ours, bare_s, beside)


def _with_bare_cipher(
    name: str,
    read: Callable[[int], None],
    bare: Callable[[], None],
    threads: ThreadPoolExecutor,
    into: list[np.ndarray],
) -> float:
    """The raw client, and each value sealed anew by one call of the cipher, as a multiple of the raw client alone."""
    cipher, size = CIPHERS[name](bytes(KEY_BYTES)), into[0].nbytes
    nonce, sealed = bytes(cipher.nonce_bytes), [memoryview(bytearray(size + TAG_BYTES)) for _ in range(THREADS)]
    plain = memoryview(bytearray(size))

    def read_and_seal(n: int) -> None:
        read(n)
        cipher.encrypt_into(nonce, plain, b"", sealed[n % THREADS])

    ratio, _, _ = _compare(bare, lambda: list(threads.map(read_and_seal, range(len(into)))))
    return ratio


def _filled(url: str, size: int, ring: KeyRing) -> tuple[TieredStore, ChunkShape, list[bytes]]:
    tier = {"url": url, "max_fetches": THREADS}
    config = {"tiers": [tier], "deadline_ms": 60_000, "break_even": False, "piece_bytes": 16 * MIB}
    store = TieredStore.open(config, ring=ring)
    shape = ChunkShape(tokens=256, payload_bytes=size, layers=1, dtype="bfloat16")
    keys = [n.to_bytes(32, "big") for n in range(max(4, ROUND_BYTES // size))]
    for n, key in enumerate(keys):
        kept = store.store(NAMESPACE, key, shape, [np.full(size, n % 251, dtype=np.uint8).data])
        assert kept.stored, kept
    return store, shape, keys


def _load(store: TieredStore, shape: ChunkShape, keys: list[bytes], into: list[np.ndarray]) -> Callable[[], None]:
    plan = store.plan(NAMESPACE, keys, shape)
    views = [memoryview(buffer) for buffer in into]

    def load() -> None:
        assert store.fetch(plan, views).ready

    return load


def _compare(bare: Callable[[], None], ours: Callable[[], None]) -> tuple[float, float, float]:
    """Median ratio, and the median seconds of both."""
    pairs = []
    bare(), ours()
    for _ in range(ROUNDS):
        pairs.append((_seconds(ours), _seconds(bare)))
    ratio = statistics.median(one / other for one, other in pairs)
    return ratio, statistics.median(p[0] for p in pairs), statistics.median(p[1] for p in pairs)


def _seconds(work: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def _figure(name: str, ratio: float, limit: float | None, ours_s: float, bare_s: float, bare: str) -> Figure:
    """The ceiling is the bare thing's speed; ours is that divided by the ratio."""
    ours_gb_s = ROUND_BYTES / ours_s / 1e9
    return Figure(name, ratio, "x", limit, ROUND_BYTES / bare_s / 1e9, f"GB/s, {bare}; ours {ours_gb_s:.2f}")


def _remove_shared(url: str) -> None:
    shutil.rmtree(f"/dev/shm/kvrelay-{os.getuid()}-{url.removeprefix('memory://')}", ignore_errors=True)
