"""The simulator against others, at full length: minutes of work, no engine."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import pytest

from kvrelay.core.cachesim.eviction.belady import Belady, next_uses
from kvrelay.core.cachesim.eviction.fifo import Fifo
from kvrelay.core.cachesim.eviction.lru import Lru
from kvrelay.core.cachesim.eviction.ttl import Ttl
from kvrelay.core.cachesim.prefix import run_prefix_caches
from kvrelay.lab.sim.cells import RoutingCell, Source, answer_cell
from kvrelay.lab.sim.sweep import digest, run_cells
from kvrelay.lab.sizing.distances import stack_distances
from tests.core.cachesim.oracle import brute_force_ttl, library_hits, zipf_keys
from tests.core.cachesim.reference import TRACES, agreeing, capacity_figures, reference_trace, rows, ttl_figures
from tests.core.cachesim.test_eviction import LIBRARY
from tests.lab.sim.small_trace import write_small_trace
from tests.lab.sim.test_cells import every_kind
from tests.lab.sim.test_live_gateway import same_receipts

pytestmark = [pytest.mark.real, pytest.mark.cpu_bound, pytest.mark.timeout(900)]

MILLION = 1_000_000
SHIPPED = [row for row in rows()["capacity"] if (TRACES / row["file"]).exists()]


@pytest.mark.covers("TU-03")
@pytest.mark.parametrize("name", dict.fromkeys(row["file"] for row in SHIPPED))
def test_all_capacity_rows_are_reproduced(name):
    for row in SHIPPED:
        if row["file"] == name:
            figures = capacity_figures(row)
            assert figures == agreeing(figures, row), row


@pytest.mark.covers("SM-01")
def test_all_rows_with_a_time_to_live_are_reproduced():
    for row in rows()["ttl"]:
        figures = ttl_figures(row)
        assert figures == agreeing(figures, row), row


@pytest.mark.covers("TU-03")
@pytest.mark.parametrize("name", LIBRARY)
def test_a_million_accesses_as_another_library_sees_them(name):
    keys = zipf_keys(MILLION)
    ours = LIBRARY[name](5000)
    assert [ours.access(key, 0.0) for key in keys] == library_hits(name, 5000, keys)


@pytest.mark.covers("SM-01")
def test_a_long_trace_with_a_time_to_live_against_brute_force():
    rng = np.random.default_rng(7)
    at_s = np.cumsum(rng.exponential(1.0, 100_000)).tolist()
    accesses = list(zip((rng.zipf(1.3, 100_000) % 400).tolist(), at_s, strict=True))
    ours = Ttl(60, ttl_s=90.0)
    assert [ours.access(key, at) for key, at in accesses] == brute_force_ttl(60, 90.0, accesses)


def test_a_sweep_on_a_dask_cluster_answers_what_one_process_does(tmp_path):
    pytest.importorskip("distributed", reason="the `dask` extra")
    cells = every_kind(Source(str(write_small_trace(tmp_path / "small.jsonl"))))
    assert digest(run_cells(cells, jobs=2, dask="local")) == digest(run_cells(cells, jobs=1))


@pytest.mark.covers("TU-05")
def test_ten_million_stack_distances_in_ten_seconds():
    """Of processor time: one thread that waits for nothing, so as long as a quiet machine takes."""
    pytest.importorskip("numba", reason="the `sim` extra")
    keys = np.unique(np.random.default_rng(1).zipf(1.05, 10 * MILLION) % MILLION, return_inverse=True)[1]
    distinct, starts = int(keys.max()) + 1, np.arange(len(keys) + 1)
    stack_distances(keys[:10], starts[:11], distinct)  # compiles
    began_s = time.process_time()
    distances = stack_distances(keys, starts, distinct)
    assert time.process_time() - began_s < 10
    assert int((distances == 0).sum()) == distinct


# Hit tokens of the last half of mooncake_conversation_full by `kvcache-simulator` 0.1.3 (PyPI), the program behind the
# published curves: capacity in blocks -> (fifo, lru, optimal). The published files are of other traces.
PUBLISHERS_OWN = {
    500: (2958408, 3085579, 9512173),
    2_000: (3637096, 3814129, 18054257),
    8_000: (11009313, 12515013, 26967412),
    20_000: (18136580, 20586572, 27038068),
}


class FifoAtOnce(Fifo):
    """The publishers' FIFO makes room before each block, not after each request."""

    def admit(self, keys, now_s):
        for key in keys:
            self.access(key, now_s)


@pytest.mark.covers("TU-03")
@pytest.mark.skipif(not SHIPPED, reason="the traces are not at hand")
@pytest.mark.parametrize("capacity", PUBLISHERS_OWN)
def test_hit_tokens_are_those_of_the_program_behind_the_published_curves(capacity):
    trace = reference_trace("mooncake_conversation_full.jsonl.gz")
    future = next_uses([request.blocks for request in trace.requests])
    caches = (partial(FifoAtOnce, capacity), partial(Lru, capacity), partial(Belady, capacity, future=future))
    found = tuple(run_prefix_caches(trace, make).hit_second_half.tokens for make in caches)
    assert found == PUBLISHERS_OWN[capacity]


@pytest.mark.covers("SM-06", "SM-07")
def test_the_live_gateway_and_the_simulator_write_the_same_5000_receipts():
    assert len(same_receipts(seed=1, count=5_000)) == 5_000


@pytest.mark.covers("SM-06")
@pytest.mark.skipif(not SHIPPED, reason="the traces are not at hand")
def test_a_whole_public_trace_goes_through_the_router_in_a_minute():
    """Processor time, which is what a quiet machine takes: the simulation has one thread and waits for nothing."""
    source = Source(str(TRACES / "mooncake_conversation_full.jsonl.gz"))
    began_s = time.process_time()
    answer = answer_cell(RoutingCell(source, "cache_load", 8_000, 4))
    assert time.process_time() - began_s < 60
    assert answer.requests == 12_031 and answer.statuses == {"ok": 12_031}
    assert answer.claimed_tokens >= answer.hit_tokens > 0
