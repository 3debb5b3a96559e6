"""What workers report on their own pages: passed on as it is, and absent and flagged where it is not there."""

from __future__ import annotations

import pytest

from kvrelay.core.model.ids import WorkerId
from kvrelay.edge.connectors.base import ReportedLoad, Scrape
from kvrelay.edge.fleet.view import WorkerView
from kvrelay.edge.observe.fleet_gauges import SOURCES, Costs, costs_of, fleet_gauges
from kvrelay.edge.system.config import Config


def view(name: str, scrape: Scrape | None, *, joined: bool = True) -> WorkerView:
    return WorkerView(
        name=name,
        url=f"http://{name}",
        headers={},
        worker=WorkerId(name, "1") if joined else None,
        connector=None,
        spec=None,
        version=None,
        engine="vllm",
        last_probe_ok=True,
        last_probe_detail="",
        sources=(),
        last_seq={},
        held_messages=0,
        malformed_messages=0,
        last_scrape=scrape,
        events_problem=None,
        tells_lives=True,
        agent=None,
    )


FULL = Scrape(
    ranks={0: ReportedLoad(1, 2, 0.5)},
    prefix_queries_tokens=900,
    prefix_hits_tokens=600,
    hits_by_tier_tokens={"gpu": 597, "peer": 3},
)
POOR = Scrape(ranks={0: ReportedLoad(running_requests=1)}, prefix_queries_tokens=100)


def samples(*views: WorkerView, costs: Costs = Costs()) -> dict[str, float]:
    found = {}
    for family in fleet_gauges(views, costs, {"A": 12.5}):
        for sample in family.samples:
            labels = ",".join(sample.labels.values())
            found[f"{sample.name.removeprefix('kvrelay_')}({labels})"] = sample.value
    return found


@pytest.mark.covers("OB-08", "OB-10")
def test_totals_of_tokens_are_passed_on_by_worker_and_tier() -> None:
    found = samples(view("A", FULL))
    assert found["reported_prefix_queries_tokens(A)"] == 900
    assert found["reported_prefix_hits_tokens(A)"] == 600
    assert found["reported_cached_tokens(A,gpu)"] == 597
    assert found["reported_cached_tokens(A,peer)"] == 3
    assert found["worker_joined_timestamp_seconds(A)"] == 12.5


@pytest.mark.covers("OB-10", "S40")
def test_what_a_page_lacks_is_absent_and_flagged() -> None:
    found = samples(view("A", FULL), view("B", POOR), view("C", None), view("D", None, joined=False))
    assert "reported_prefix_hits_tokens(B)" not in found
    flags = {source: found[f"source_available(B,{source})"] for source in SOURCES}
    assert flags == {
        "running_requests": 1,
        "waiting_requests": 0,
        "kv_usage_ratio": 0,
        "prefix_queries_tokens": 1,
        "prefix_hits_tokens": 0,
        "hits_by_tier_tokens": 0,
    }
    assert {found[f"source_available(A,{source})"] for source in SOURCES} == {1}
    assert {found[f"source_available(C,{source})"] for source in SOURCES} == {0}
    assert not [name for name in found if "(D" in name], "of a worker that never answered nothing is known"


@pytest.mark.covers("OB-05")
def test_gpus_and_their_price_are_absent_where_not_configured() -> None:
    config = Config.model_validate(
        {
            "workers": [
                {"url": "http://127.0.0.1:1", "name": "A", "gpus": 8},
                {"url": "http://127.0.0.1:2", "name": "B"},
            ],
            "observe": {"gpu_hour_price": 2.5},
        }
    )
    both = view("A", FULL), view("B", FULL)
    found = samples(*both, costs=costs_of(config))
    assert (found["worker_gpus(A)"], found["gpu_hour_price()"]) == (8, 2.5)
    assert "worker_gpus(B)" not in found
    assert not [name for name in samples(*both) if name.startswith(("worker_gpus", "gpu_hour"))]
