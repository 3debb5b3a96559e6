"""A real Valkey that is stopped in its tracks, or whose path swallows everything, and that goes on later."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from kvrelay.core.tiers.outcome import Outcome
from kvrelay.edge.chaos.tcp import TcpProxy
from kvrelay.edge.stores.config import open_store
from kvrelay.edge.stores.tiered import TieredStore
from kvrelay.edge.stores.wrappers import Metered
from tests.edge.stores.test_outages import keep_all, load, timed, until
from tests.edge.stores.test_tiered import NAMESPACE, SHAPE, payload
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


MOST_FETCHES = 3
CHAINS = [tuple(bytes([chain, n]) * 16 for n in range(2)) for chain in range(12)]


def load_chain(store: TieredStore, keys: Sequence[bytes]) -> bool:
    """Whether all of it came."""
    plan = store.lookup(NAMESPACE, keys, SHAPE)
    into = [bytearray(SHAPE.payload_bytes) for _ in plan.keys]
    fetched = store.fetch(plan, [memoryview(buffer) for buffer in into])
    for outcome, buffer in zip(fetched.outcomes, into, strict=True):
        assert outcome is not Outcome.HIT or bytes(buffer) == payload(0)
    return fetched.leading_hits == len(keys)


@pytest.mark.covers("S39")
async def test_a_path_that_swallows_everything_costs_one_deadline_and_its_return_brings_no_burst(
    tmp_path: Path,
) -> None:
    """A real Valkey behind our chaos proxy. When the path is back, twelve callers ask for twelve prefixes at once, over
    a path slow enough for their fetches to overlap."""
    server = valkey(tmp_path)
    server.start()
    async with TcpProxy("127.0.0.1", server.port) as proxy:
        metered = Metered(open_store(f"valkey://{proxy.address}"))
        tier = {"url": f"valkey://{proxy.address}", "max_fetches": MOST_FETCHES}
        config = {"tiers": [tier], "deadline_ms": DEADLINE_MS, "probe_interval_s": 0.5, "break_even": False}
        store = TieredStore.open(config, stores=[metered])
        try:
            for keys in CHAINS:
                for key in keys:
                    done = await asyncio.to_thread(store.store, NAMESPACE, key, SHAPE, [payload(0)])
                    assert done.stored
            assert await asyncio.to_thread(load_chain, store, CHAINS[0])

            proxy.do("blackhole")
            costs_ms = [await timed_in_thread(load_chain, store, keys) for keys in 2 * CHAINS]
            assert sum(cost_ms > DEADLINE_MS / 2 for cost_ms in costs_ms) == 1, costs_ms
            assert max(costs_ms) < 1.5 * DEADLINE_MS and sum(costs_ms) < 2 * DEADLINE_MS, costs_ms

            metered.most_at_once, store_calls = 0, metered.calls.get("read", 0)
            proxy.do("clear; latency 20ms")
            came = 0
            async with asyncio.timeout(10):
                while came < len(CHAINS):
                    loads = [asyncio.to_thread(load_chain, store, keys) for keys in CHAINS]
                    came = sum(await asyncio.gather(*loads))
                    await asyncio.sleep(0.01)
            assert metered.calls["read"] - store_calls >= 2 * len(CHAINS)
            assert metered.most_at_once == MOST_FETCHES, (
                "never more at once than configured, and as many when it is well"
            )
        finally:
            await asyncio.to_thread(store.close)
            server.kill()


async def timed_in_thread(work: Callable[..., object], *arguments: object) -> float:
    return await asyncio.to_thread(timed, partial(work, *arguments))
