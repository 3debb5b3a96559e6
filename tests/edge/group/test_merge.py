"""Many admin answers into one, and many metrics pages into one that never falls."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kvrelay.core.routing.status import TargetStatus, WorkerStatus
from kvrelay.edge.group import merge
from kvrelay.edge.group.merge_metrics import GroupPages
from kvrelay.edge.observe.metric_table import METRICS
from kvrelay.edge.observe.metrics import Metrics
from tests.edge.gateway.scripted import ScriptedWorker, client_of, running, token_body


def target(**more: Any) -> dict[str, Any]:
    return {
        "rank": 0,
        "index_state": "live",
        "index_blocks": {"gpu": 10},
        "active_requests": 1,
        "foreign_requests": 0,
        "reported_running": None,
        "prefill_tokens_per_s": 100.0,
        "next_event_seq": 7,
        **more,
    }


def worker(name: str = "a", **more: Any) -> dict[str, Any]:
    given = {"name": name, "up": True, "routable": True, "draining": False, "targets": [target()], **more}
    return {**given, "events": {"stored": 2}}


def test_own_counts_add_up_and_views_of_one_thing_do_not() -> None:
    one = worker(targets=[target(index_blocks={"gpu": 10, "cpu": 1}, reported_running=3)])
    two = worker(targets=[target(index_blocks={"gpu": 12}, prefill_tokens_per_s=300.0, next_event_seq=9)])
    status = merge.merged_status(
        [
            {"policy": "sticky", "live_requests": 2, "sessions": 5, "workers": [one]},
            {"policy": "sticky", "live_requests": 3, "sessions": 4, "workers": [two]},
        ]
    )
    assert (status["policy"], status["live_requests"], status["sessions"]) == ("sticky", 5, 5)
    (merged,) = status["workers"]
    (merged_target,) = merged["targets"]
    assert merged_target["active_requests"] == 2
    assert merged_target["index_blocks"] == {"gpu": 12, "cpu": 1}
    assert (merged_target["reported_running"], merged_target["next_event_seq"]) == (3, 7)
    assert merged_target["prefill_tokens_per_s"] == 200.0
    assert merged["events"] == {"stored": 4}


@pytest.mark.parametrize(
    ("member", "values", "expected"),
    [
        ("routable", (True, False), False),
        ("up", (True, True), True),
        ("draining", (False, True), True),
        ("standing", ("routable", "suspended"), "suspended"),
    ],
)
def test_what_must_hold_everywhere_holds_only_then(member: str, values: tuple[Any, Any], expected: Any) -> None:
    status = merge.merged_status([{"workers": [worker(**{member: value})]} for value in values])
    assert status["workers"][0][member] == expected


def test_the_worst_state_of_an_index_is_shown() -> None:
    parts = [{"workers": [worker(targets=[target(index_state=state)])]} for state in ("live", "incomplete", "live")]
    assert merge.merged_status(parts)["workers"][0]["targets"][0]["index_state"] == "incomplete"


def test_workers_that_only_some_know_yet_are_listed() -> None:
    merged = merge.merged_workers([{"workers": [worker("a")]}, {"workers": [worker("b"), worker("a")]}])
    assert [each["name"] for each in merged["workers"]] == ["a", "b"]


def test_what_is_unknown_everywhere_stays_unknown_and_is_not_zero() -> None:
    for rule in (merge.total, merge.largest, merge.smallest, merge.mean, merge.first):
        assert rule([None, None]) is None


def test_receipts_are_in_order_of_their_ends_and_the_newest_of_an_id_counts() -> None:
    def receipt(request_id: str, arrived_ms: float, e2e_ms: float) -> dict[str, Any]:
        return {"request_id": request_id, "arrived_ms": arrived_ms, "e2e_ms": e2e_ms}

    long, short, later = receipt("long", 0, 100), receipt("short", 10, 5), receipt("later", 50, 5)
    merged = merge.merged_receipts([{"receipts": [long]}, {"receipts": [later, short]}], limit=2)
    assert [each["request_id"] for each in merged["receipts"]] == ["long", "later"]
    assert merge.newest_receipt([receipt("x", 0, 1), receipt("x", 5, 1)])["arrived_ms"] == 5
    assert merge.newest_receipt([]) is None


def test_every_number_of_a_worker_has_a_rule() -> None:
    """A number without a rule would be one process's own, shown as if it were that of all."""
    fixed = {"rank", "block_size"}
    numbers = [name for name in TargetStatus.__struct_fields__ if name not in fixed and not name.startswith("index_p")]
    assert [name for name in numbers if name not in merge.TARGET] == []
    texts = {"name", "incarnation", "url", "engine", "models", "adapters", "role"}
    assert [name for name in WorkerStatus.__struct_fields__ if name not in {*merge.ROUTER_WORKER, *texts}] == []


# --- metrics ---------------------------------------------------------------------------------------------------------


def page(requests: float = 0, seconds: float | None = None, worker: str = "a") -> str:
    metrics = Metrics()
    metrics.requests.add((worker, "sticky", "ok"), requests)
    if seconds is not None:
        metrics.e2e.observe(seconds, "r-1")
    return metrics.render().decode()


def read(pages: GroupPages) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(pages.render().decode())
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


OK = ("kvrelay_requests_total", "sticky", "ok", "a")


def test_counters_and_histograms_add_up_and_keep_their_shape() -> None:
    pages = GroupPages()
    pages.take(0, page(3, 0.02))
    pages.take(1, page(4, 7.0))
    values = read(pages)
    assert values[OK] == 7
    assert (values["kvrelay_e2e_seconds_count",], values["kvrelay_e2e_seconds_sum",]) == (2, 7.02)
    bounds = [(float(key[1]), value) for key, value in values.items() if key[0] == "kvrelay_e2e_seconds_bucket"]
    assert bounds == sorted(bounds) and bounds[-1] == (float("inf"), 2)
    assert b"# TYPE kvrelay_requests_total counter" in pages.render()
    assert b"# TYPE kvrelay_e2e_seconds histogram" in pages.render()


def test_what_the_dead_counted_stays_and_what_they_held_goes() -> None:
    pages = GroupPages()
    gauge = "# TYPE kvrelay_queue_depth gauge\nkvrelay_queue_depth 5\n"
    pages.take(0, page(3) + gauge)
    pages.take(1, page(4) + gauge)
    assert read(pages)["kvrelay_queue_depth",] == 10
    pages.silent(0)
    assert (read(pages)[OK], read(pages)["kvrelay_queue_depth",]) == (7, 5)
    pages.died(0)
    pages.take(0, page(1))
    assert (read(pages)[OK], read(pages)["kvrelay_queue_depth",]) == (8, 5)
    pages.died(0)
    assert read(pages)[OK] == 8
    pages.forget_worker("a")
    assert read(pages)[OK] == 4, "only the living ones can still speak of it"


@settings(deadline=None, max_examples=15)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6), st.integers(0, 2**32))
def test_a_death_changes_no_sum_by_as_little_as_a_rounding(seconds: list[float], seed: int) -> None:
    pages = GroupPages()
    for process, value in enumerate(seconds):
        pages.take(process, page(1, value))
    before = pages.render()
    order = list(range(len(seconds)))
    random.Random(seed).shuffle(order)
    for process in order:
        pages.died(process)
    assert pages.render() == before


async def test_every_gauge_says_how_it_is_merged() -> None:
    async with running(ScriptedWorker("a")) as gateway, client_of(gateway) as client:
        await client.post(token_body())
        families = text_string_to_metric_families(gateway.metrics.render().decode())
        assert [family.name for family in families if family.type == "gauge" and family.name not in METRICS] == []
