"""The series of a tier in host memory: what moved, how long that took, what went up and down, how full it is."""

from __future__ import annotations

import pytest

from kvrelay.edge.stores.memory import MemoryStore
from tests.edge.stores.test_outages import KEYS, NAMESPACE, SHAPE, Remote, load, open_over, payload, until
from tests.edge.stores.test_tiers import OBJECT_BYTES, TWO_TIERS


def series(lines: list[str]) -> dict[str, float]:
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


@pytest.mark.covers("TR-04")
def test_a_host_tiers_five_series() -> None:
    """Two chunks fit. Six are kept, so four are demoted; the four are loaded again, so four are promoted."""
    tiers = [{**TWO_TIERS["near"], "bytes": 2 * OBJECT_BYTES}, {**TWO_TIERS["far"], "write": "back"}]
    store = open_over(MemoryStore(), Remote(), tiers=tiers, deadline_ms=5000.0, break_even=False)
    try:
        for number, key in enumerate(KEYS):
            assert store.store(NAMESPACE, key, SHAPE, [payload(number)]).stored
        copies = 'kvrelay_store_ops_total{tier="%s",op="copy",outcome="stored"}'
        until(lambda: series(store.metrics()).get(copies % "far") == 4, within_s=5)
        assert load(store, KEYS[4:]).ready, "from host memory"
        for number in range(4):
            assert load(store, KEYS[number : number + 1]).ready, "from below"
        until(lambda: series(store.metrics()).get(copies % "near") == 4, within_s=5)
        found = series(store.metrics())
        assert found['kvrelay_store_bytes_total{tier="near",direction="read"}'] == 2 * OBJECT_BYTES
        assert found['kvrelay_store_bytes_total{tier="near",direction="written"}'] == (6 + 4) * OBJECT_BYTES
        assert found['kvrelay_store_seconds_count{tier="near",op="fetch"}'] == 2
        assert found['kvrelay_store_seconds_sum{tier="near",op="fetch"}'] > 0
        assert found['kvrelay_store_seconds_count{tier="near",op="store"}'] == 6
        assert found['kvrelay_store_seconds_sum{tier="near",op="store"}'] > 0
        assert found['kvrelay_store_used_bytes{tier="near"}'] == 2 * OBJECT_BYTES, "full"
        assert found['kvrelay_store_capacity_bytes{tier="near"}'] == 2 * OBJECT_BYTES
    finally:
        store.close()
