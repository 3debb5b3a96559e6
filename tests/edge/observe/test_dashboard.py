"""Dashboard and alerts as files: five rows, nothing that is not in the table, no mean alone, kept copies current."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from kvrelay.core.doctor.window_rules import WINDOW_RULES
from kvrelay.edge.observe import panels
from kvrelay.edge.observe.alerts import ALERTS, BY_CODE
from kvrelay.edge.observe.dashboard import dashboard
from kvrelay.edge.observe.files import grafana_json, metrics_markdown, rules_yaml
from kvrelay.edge.observe.metric_table import DASHBOARD_ROWS, METRICS, of_row
from kvrelay.edge.observe.promql import rate
from kvrelay.edge.observe.runbook import runbook

ROOT = Path(__file__).parents[3]
_NAMES = re.compile(r"\bkvrelay_[a-z0-9_]+")


def expressions() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]


def named(expression: str) -> set[str]:
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name in _NAMES.findall(expression)}


@pytest.mark.covers("TP-12")
def test_grafana_s_own_types_take_all_of_it_and_lose_nothing() -> None:
    register_default_plugins()
    as_file = json.loads(grafana_json())
    read = json.loads(json.dumps(Dashboard.from_json(as_file), cls=JSONEncoder))
    assert lost(as_file, read) == []


def lost(given: Any, read: Any, path: str = "") -> list[str]:
    """Members of `given` that `read` does not have as they were."""
    match given:
        case dict():
            if not isinstance(read, dict):
                return [path]
            return [one for key, value in given.items() for one in lost(value, read.get(key), f"{path}/{key}")]
        case list():
            pairs = zip(given, read or [None] * len(given), strict=True)
            return [one for at, (value, other) in enumerate(pairs) for one in lost(value, other, f"{path}[{at}]")]
        case _:
            return [] if given == read or (given in (False, "") and read is None) else [path]


@pytest.mark.covers("OB-01", "OB-02", "OB-03", "OB-04", "OB-05")
def test_there_are_exactly_the_five_rows_and_each_shows_all_its_metrics() -> None:
    shown: dict[str, set[str]] = {}
    row = ""
    for panel in dashboard()["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
        for target in panel.get("targets", ()):
            shown.setdefault(row, set()).update(named(target["expr"]))
    assert list(shown) == [one.value for one in DASHBOARD_ROWS]
    for one in DASHBOARD_ROWS:
        everywhere = set().union(*shown.values())
        missing = {spec.name for spec in of_row(one)} - everywhere
        assert missing == set(), f"{one.value} does not show {missing}"


def test_panels_do_not_overlap_and_have_numbers_of_their_own() -> None:
    laid = dashboard()["panels"]
    assert len({panel["id"] for panel in laid}) == len(laid)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in laid)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))


def test_nothing_is_asked_for_that_the_table_does_not_have() -> None:
    for expression in (*expressions(), *(alert.expression for alert in ALERTS)):
        assert named(expression) <= METRICS.keys(), expression
    with pytest.raises(AssertionError):
        rate("kvrelay_spills_total", by=("client",))


@pytest.mark.covers("OB-06", "OB-07")
def test_waiting_is_shown_as_percentiles_with_enough_values_and_never_as_a_mean() -> None:
    for panel in dashboard()["panels"]:
        asked = [target["expr"] for target in panel.get("targets", ())]
        histograms = {name for one in asked for name in named(one) if METRICS[name].kind == "histogram"}
        assert not any(re.search(r"\bavg\b|_sum\b", one) for one in asked), panel["title"]
        if histograms and histograms != {"kvrelay_store_seconds"}:
            assert all("histogram_quantile" in one or "_count" in one for one in asked)
            percentiles = [one for one in asked if "histogram_quantile" in one]
            assert percentiles and all(f">= {panels.MIN_SAMPLES}" in one for one in percentiles)
            assert panel["fieldConfig"]["defaults"]["noValue"].startswith("insufficient_samples")
    for name in ("ttft", "itl", "e2e", "session_wall"):
        quantiles = [one for one in expressions() if f"kvrelay_{name}_seconds_bucket" in one]
        assert [one.partition("(")[2].partition(",")[0] for one in quantiles] == ["0.5", "0.95", "0.99"]


def test_every_rule_about_traffic_has_an_alert_with_a_runbook_section() -> None:
    assert {rule.code for rule in WINDOW_RULES} <= {alert.code for alert in ALERTS} <= BY_CODE.keys()
    text = runbook()
    for alert in ALERTS:
        assert f"\n### {alert.code}\n" in text
        assert f'"http://127.0.0.1:8001/ui/runbooks#{alert.code}"' in rules_yaml()


@pytest.mark.covers("OP-14")
def test_a_runbook_has_target_baseline_rollback_and_acceptance_per_drill() -> None:
    text = runbook(drills=(("worker_lost", "requests end elsewhere"),), targets=("TTFT p95 at most 2 s",))
    for heading in ("## Target", "## Baseline", "## Rollback", "## When an alert fires", "## Drills"):
        assert f"\n{heading}\n" in text
    assert "- TTFT p95 at most 2 s" in text
    assert "| `worker_lost` | requests end elsewhere | verdict `pass`, and" in text


@pytest.mark.parametrize(
    ("kept", "made"),
    [
        ("deploy/grafana/kvrelay.json", grafana_json),
        ("deploy/prometheus/kvrelay.rules.yml", rules_yaml),
        ("docs/metrics.md", metrics_markdown),
    ],
)
def test_kept_copies_are_current(kept: str, made: Any) -> None:
    command = (
        Path(kept).stem
        if kept.startswith("docs")
        else {"grafana": "grafana", "prometheus": "alerts"}[kept.split("/")[1]]
    )
    assert (ROOT / kept).read_text(encoding="utf-8") == made(), f"make it anew: kvrelay dashboard {command} > {kept}"
