"""Every alert fires when its trouble is there and stays quiet when it is not, by promtool's own evaluation."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvrelay.core.receipts.tasks import TaskLedger
from kvrelay.edge.observe.alerts import ALERTS
from kvrelay.edge.observe.files import rules_yaml
from kvrelay.edge.observe.metrics import Metrics
from kvrelay.edge.observe.task_counts import TaskCounts
from tests.edge.observe.samples import receipt

pytestmark = pytest.mark.real

Series = Mapping[str, str]
MINUTES = 60


def ttft(cache: str, p50_s: float, per_minute: int = 30) -> Series:
    """All values of one bucket whose upper limit is near the wanted median."""
    name = "kvrelay_ttft_by_cache_seconds"
    labels = f'cache="{cache}",prompt="up_to_4k"'
    rising = f"0+{per_minute}x{MINUTES}"
    return {
        f'{name}_bucket{{{labels},le="{p50_s * 0.9:g}"}}': f"0+0x{MINUTES}",
        f'{name}_bucket{{{labels},le="{p50_s * 1.1:g}"}}': rising,
        f'{name}_bucket{{{labels},le="+Inf"}}': rising,
        f"{name}_count{{{labels}}}": rising,
    }


def tokens(hit_share: float, eligible: int = 10_000) -> Series:
    return {
        "kvrelay_eligible_tokens_total": f"0+{eligible}x{MINUTES}",
        "kvrelay_unaccounted_eligible_tokens_total": f"0+0x{MINUTES}",
        'kvrelay_actual_cached_tokens_total{worker="a",tier="engine"}': f"0+{round(eligible * hit_share)}x{MINUTES}",
    }


def requests(failed_per_minute: int) -> Series:
    return {
        'kvrelay_requests_total{worker="a",status="ok"}': f"0+100x{MINUTES}",
        'kvrelay_requests_total{worker="a",status="worker_lost"}': f"0+{failed_per_minute}x{MINUTES}",
    }


def claims(stale_per_minute: int) -> Series:
    return {
        'kvrelay_claimed_tokens_total{worker="a",tier="gpu"}': f"0+5000x{MINUTES}",
        'kvrelay_stale_claim_tokens_total{worker="a"}': f"0+{stale_per_minute}x{MINUTES}",
    }


def level(name: str, value: float, labels: str = 'worker="a"') -> Series:
    return {f"{name}{{{labels}}}": f"{value:g}+0x{MINUTES}"}


def active(hottest: int) -> Series:
    return {**level("kvrelay_active_requests", hottest), **level("kvrelay_active_requests", 2, 'worker="b"')}


# code -> (series with the trouble, series without it)
CASES: dict[str, tuple[Series, Series]] = {
    "router": (level("kvrelay_worker_up", 0), level("kvrelay_worker_up", 1)),
    "requests_failing": (requests(20), requests(1)),
    "index": (level("kvrelay_index_usable", 0), level("kvrelay_index_usable", 1)),
    "remote_slow": (
        {**ttft("warm", 0.4), **ttft("cold", 0.4), **tokens(0.8)},
        {**ttft("warm", 0.1), **ttft("cold", 0.4), **tokens(0.8)},
    ),
    "capacity_or_chunk": (
        {**ttft("warm", 0.1), **ttft("cold", 0.4), **tokens(0.1)},
        {**ttft("warm", 0.1), **ttft("cold", 0.4), **tokens(0.4)},
    ),
    "index_stale": (claims(1000), claims(100)),
    "hot_worker": (active(20), active(5)),
    "breaker_open": (
        level("kvrelay_store_in_use", 0, 'tier="remote"'),
        level("kvrelay_store_in_use", 1, 'tier="remote"'),
    ),
    "orphan_growth": (
        {'kvrelay_orphan_blocks{worker="a"}': f"0+20x{MINUTES}"},
        {'kvrelay_orphan_blocks{worker="a"}': f"500+1x{MINUTES}"},
    ),
    "cold_cache": (
        {**level("kvrelay_worker_joined_timestamp_seconds", 2900), **tokens(0.2)},  # the test's clock begins at 0
        {**level("kvrelay_worker_joined_timestamp_seconds", 0), **tokens(0.2)},
    ),
    "metrics": (
        level("kvrelay_source_available", 0, 'worker="a",source="prefix_hits_tokens"'),
        level("kvrelay_source_available", 1, 'worker="a",source="prefix_hits_tokens"'),
    ),
}
FEW: Series = {**ttft("warm", 0.4, 1), **ttft("cold", 0.4, 1), **tokens(0.8)}
AT = "50m"


def case(name: str, series: Series, firing: set[str]) -> dict[str, Any]:
    """Which alerts are there at all is asked of Prometheus itself: `ALERTS` is a series."""
    return {
        "name": name,
        "interval": "1m",
        "input_series": [{"series": one, "values": values} for one, values in series.items()],
        "promql_expr_test": [
            {
                "expr": 'count by (code) (ALERTS{alertstate="firing"})',
                "eval_time": AT,
                "exp_samples": [{"labels": f'{{code="{code}"}}', "value": 1} for code in sorted(firing)],
            }
        ],
    }


@pytest.mark.covers("OB-13", "OB-11", "OB-07")
def test_each_alert_fires_for_its_trouble_only(tmp_path: Path) -> None:
    assert CASES.keys() == {alert.code for alert in ALERTS}
    (tmp_path / "kvrelay.rules.yml").write_text(rules_yaml())
    cases = [case(f"{code} fires", series, {code}) for code, (series, _) in CASES.items()]
    cases += [case(f"{code} is quiet", series, set()) for code, (_, series) in CASES.items()]
    cases += [case("too few values", FEW, set()), case("nothing", {}, set())]
    tests = {"rule_files": ["kvrelay.rules.yml"], "evaluation_interval": "1m", "tests": cases}
    (tmp_path / "tests.yml").write_text(json.dumps(tests))
    promtool("test", "rules", str(tmp_path / "tests.yml"))


def test_promtool_accepts_the_kept_rules() -> None:
    promtool("check", "rules", str(Path(__file__).parents[2] / "deploy" / "prometheus" / "kvrelay.rules.yml"))


@pytest.mark.covers("OB-14")
def test_promtool_finds_nothing_wrong_with_a_page() -> None:
    metrics = Metrics()
    metrics.bind_tasks(TaskCounts(TaskLedger(idle_s=1, max_open=10)), lambda: 1e6)
    for number in range(3):
        metrics.observe_receipt(receipt(str(number)))
    promtool("check", "metrics", page=metrics.render())


def promtool(*arguments: str, page: bytes = b"") -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.fail("no `promtool` here: `make prometheus` installs the Debian package", pytrace=False)
    run = subprocess.run([program, *arguments], input=page, capture_output=True, check=False)
    assert run.returncode == 0, (run.stdout + run.stderr).decode()
