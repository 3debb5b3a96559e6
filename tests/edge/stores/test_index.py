"""Tiers whose look-ups are answered from an index in each process, and the job that finds what it does not know."""

from __future__ import annotations

import pytest

from kvrelay.edge.stores.tiered import TieredStore
from kvrelay.edge.stores.wrappers import Metered
from tests.edge.stores.test_outages import KEYS, NAMESPACE, SHAPE, Remote, keep_all, load, open_over, payload, until

INDEXED = [{"url": "valkey://127.0.0.1", "name": "far", "index": True}]
SELDOM_S = 3600.0


def unannounced(store: TieredStore) -> int:
    count: int = store.report()["tiers"]["far"]["unannounced_objects"]
    return count


def test_a_look_up_asks_nobody() -> None:
    metered = Metered(Remote())
    store = open_over(metered, tiers=INDEXED, reconcile_s=SELDOM_S)
    keep_all(store)
    metered.calls.clear()
    assert store.lookup(NAMESPACE, KEYS, SHAPE).keys == tuple(KEYS)
    assert "sizes" not in metered.calls
    assert load(store).ready and unannounced(store) == 0, "its own saves were announced"
    store.close()


@pytest.mark.covers("CN-11")
def test_what_another_one_wrote_without_a_word_is_found_and_counted() -> None:
    """Two processes over one remote tier. The second one hears nothing of what the first one writes."""
    remote = Remote()
    writer = open_over(remote, tiers=INDEXED, reconcile_s=SELDOM_S)
    reader = open_over(remote, tiers=INDEXED, reconcile_s=0.1)
    keep_all(writer)
    until(lambda: unannounced(reader) == len(KEYS), within_s=5)
    assert load(reader).ready
    assert f'kvrelay_store_unannounced_objects_total{{tier="far"}} {len(KEYS)}' in reader.metrics()
    until(lambda: reader.report()["tiers"]["far"]["in_use"], within_s=1)
    assert unannounced(reader) == len(KEYS), "each of them once"
    assert unannounced(writer) == 0
    writer.close()
    reader.close()


@pytest.mark.covers("CN-13")
def test_a_process_that_is_started_again_makes_its_index_anew_and_hits_resume() -> None:
    remote = Remote()
    first = open_over(remote, tiers=INDEXED, reconcile_s=SELDOM_S)
    keep_all(first)
    first._host._alarm.stop()  # it is gone; its store, which others use, is not closed
    second = open_over(remote, tiers=INDEXED, reconcile_s=SELDOM_S)
    until(lambda: load(second).leading_hits == len(KEYS), within_s=5)
    assert unannounced(second) == 0, "what lay there before is no surprise"
    second.close()


@pytest.mark.covers("CN-12")
def test_what_the_index_knows_and_the_tier_has_lost_is_offered_once_at_most() -> None:
    remote = Remote()
    store = open_over(remote, tiers=INDEXED, reconcile_s=SELDOM_S)
    keep_all(store)
    remote.delete([info.key for info in remote.scan(deadline_s=1) if info.key.endswith(KEYS[2])], deadline_s=1)
    assert load(store).leading_hits == 2
    assert store.lookup(NAMESPACE, KEYS, SHAPE).keys == tuple(KEYS[:2]), "its entry is gone"
    assert store.report()["phantoms"] == 1
    assert store.store(NAMESPACE, KEYS[2], SHAPE, [payload(2)]).stored
    assert load(store).ready
    store.close()
