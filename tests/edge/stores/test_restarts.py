"""Processes that end at the worst moment, and what those who come after them find."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvrelay.edge.stores.config import open_store
from kvrelay.edge.stores.tiered import TieredStore
from tests.conformance.stores.places import Peer
from tests.edge.stores.test_outages import keep_all, load, until
from tests.edge.stores.test_tiered import KEYS, NAMESPACE, SHAPE

PIECES = 3
WRITER = """
import os, signal, sys
from kvrelay.edge.stores.config import open_store
from kvrelay.edge.stores.tiered import TieredStore
from kvrelay.edge.stores.wrappers import Wrapped
from tests.edge.stores.test_tiered import KEYS, NAMESPACE, SHAPE, payload

class Deadly(Wrapped):
    kind = "deadly"
    left = int(sys.argv[2])

    def write(self, *arguments, **options):
        done = super().write(*arguments, **options)
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

store = TieredStore.open(
    {"tiers": [{"url": sys.argv[1]}], "deadline_ms": 5000, "piece_bytes": 3000},
    stores=[Deadly(open_store(sys.argv[1]))],
    announce=lambda tier, key, stored_bytes: print("announced", flush=True),
)
store.store(NAMESPACE, KEYS[0], SHAPE, [payload(0)])
store.close()
"""


@pytest.mark.covers("CN-10")
@pytest.mark.parametrize("writes", range(1, PIECES + 3))
def test_a_writer_killed_between_write_and_publication_leaves_nothing_that_is_offered_and_not_there(
    writes: int, tmp_path: Path
) -> None:
    """It dies right after its n-th write has reached the store: a piece, or the manifest that comes last. With one more
    it lives."""
    url = f"file://{tmp_path}"
    command = [sys.executable, "-c", WRITER, url, str(writes)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    lived = writes > PIECES + 1
    assert (ended.returncode == 0) == lived, ended.stderr
    store = TieredStore.open({"tiers": [{"url": url}], "deadline_ms": 5000, "break_even": False})
    offered = store.lookup(NAMESPACE, KEYS[:1], SHAPE).keys
    assert bool(offered) == (writes > PIECES), "whole with its manifest, and not a moment before"
    assert load(store, KEYS[:1]).leading_hits == len(offered)
    assert ended.stdout == ("announced\n" if lived else ""), "told to others before it was certain"
    store.close()


@pytest.mark.covers("CN-13")
def test_a_store_process_that_is_started_again_knows_what_it_kept(tmp_path: Path) -> None:
    """`kvrelay store serve` over a directory is killed; the next one finds all of it, and readers hit again."""
    sidecar = Peer(f"file://{tmp_path}")
    reader = TieredStore.open({"tiers": [{"url": sidecar.url}], "deadline_ms": 2000, "probe_interval_s": 0.1})
    try:
        keep_all(reader)
        assert load(reader).leading_hits == len(KEYS)
        sidecar.kill()
        assert load(reader).leading_hits == 0
        sidecar.restart()
        until(lambda: load(reader).leading_hits == len(KEYS), within_s=20)
    finally:
        reader.close()
        sidecar.kill()


@pytest.mark.covers("CN-13")
def test_a_worker_that_is_started_again_counts_what_lies_in_its_tier(tmp_path: Path) -> None:
    """The index of a tier with a limit is in its process's memory: it is made anew from what the tier holds."""
    config = {"tiers": [{"url": f"file://{tmp_path}", "bytes": 1_000_000}], "deadline_ms": 2000}
    first = TieredStore.open(config)
    keep_all(first)
    used = first.report()["tiers"]["file"]["used_bytes"]
    first.close()
    assert used == sum(info.stored_bytes for info in open_store(f"file://{tmp_path}").scan(deadline_s=5))
    second = TieredStore.open(config)
    assert second.report()["tiers"]["file"]["used_bytes"] == used > 0
    assert load(second).leading_hits == len(KEYS)
    second.close()
