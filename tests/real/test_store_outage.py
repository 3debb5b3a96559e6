"""A real Valkey that is stopped in its tracks and goes on later."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from kvrelay.edge.stores.tiered import TieredStore
from tests.edge.stores.test_outages import keep_all, load, timed, until
from tests.real.store_servers import valkey

pytestmark = pytest.mark.real
DEADLINE_MS = 300.0


@pytest.mark.covers("S39")
def test_a_stopped_server_costs_one_deadline_and_is_used_again_when_it_goes_on(tmp_path: Path) -> None:
    server = valkey(tmp_path)
    server.start()
    tier = {"url": f"valkey://127.0.0.1:{server.port}"}
    store = TieredStore.open(
        {"tiers": [tier], "deadline_ms": DEADLINE_MS, "probe_interval_s": 0.5, "break_even": False}
    )
    try:
        keep_all(store)
        assert load(store).ready
        server.signal(signal.SIGSTOP)
        costs_ms = [timed(lambda: load(store)) for _ in range(20)]
        assert sum(cost_ms > DEADLINE_MS / 2 for cost_ms in costs_ms) == 1, costs_ms
        assert sum(costs_ms) < 2 * DEADLINE_MS, costs_ms
        server.signal(signal.SIGCONT)
        went_on_s = time.monotonic()
        until(lambda: load(store).leading_hits == 6, within_s=5.0)
        assert time.monotonic() - went_on_s < 4.0
    finally:
        store.close()
        server.kill()
