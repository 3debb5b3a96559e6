"""The simulator against others, at full length: minutes of work, no engine."""

from __future__ import annotations

import time

import numpy as np
import pytest

from kvrelay.core.cachesim.eviction.ttl import Ttl
from kvrelay.lab.sim.cells import Source
from kvrelay.lab.sim.sweep import digest, run_cells
from kvrelay.lab.sizing.distances import stack_distances
from tests.core.cachesim.oracle import brute_force_ttl, library_hits, zipf_keys
from tests.core.cachesim.reference import TRACES, agreeing, capacity_figures, rows, ttl_figures
from tests.core.cachesim.test_eviction import LIBRARY
from tests.lab.sim.small_trace import write_small_trace
from tests.lab.sim.test_cells import every_kind

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

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
    pytest.importorskip("numba", reason="the `sim` extra")
    keys = np.unique(np.random.default_rng(1).zipf(1.05, 10 * MILLION) % MILLION, return_inverse=True)[1]
    distinct, starts = int(keys.max()) + 1, np.arange(len(keys) + 1)
    stack_distances(keys[:10], starts[:11], distinct)  # compiles
    began_s = time.perf_counter()
    distances = stack_distances(keys, starts, distinct)
    assert time.perf_counter() - began_s < 10
    assert int((distances == 0).sum()) == distinct
