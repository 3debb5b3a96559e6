"""The tiered store's numbers as Prometheus text: `kvrelay_store_ops_total`, `_bytes_total`, `_seconds`, and what tiers
are like.

Label values are tier names from the configuration and words of closed sets. Text and no client library, because the
numbers live in engines' processes, whose metrics pages are not ours.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

from kvrelay.core.tiers.outcome import Outcome

BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class StoreTimes:
    """Histograms of how long operations took, per tier and operation."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, str], list[int]] = {}
        self._sums: dict[tuple[str, str], float] = {}
        self._lock = threading.Lock()

    def observe(self, tier: str, op: str, outcome: Outcome, seconds: float) -> None:
        name, at = (tier, op), bisect_left(BUCKETS_S, seconds)
        with self._lock:
            buckets = self._buckets.get(name)
            if buckets is None:
                buckets = self._buckets[name] = [0] * (len(BUCKETS_S) + 1)
            buckets[at] += 1
            self._sums[name] = self._sums.get(name, 0.0) + seconds

    def lines(self) -> list[str]:
        with self._lock:
            copied = {name: (list(buckets), self._sums[name]) for name, buckets in self._buckets.items()}
        lines = ["# TYPE kvrelay_store_seconds histogram"]
        for (tier, op), (buckets, seconds) in copied.items():
            labels, count = f'tier="{tier}",op="{op}"', 0
            for bound, entries in zip((*map(str, BUCKETS_S), "+Inf"), buckets, strict=True):
                count += entries
                lines.append(f'kvrelay_store_seconds_bucket{{{labels},le="{bound}"}} {count}')
            lines.append(f"kvrelay_store_seconds_sum{{{labels}}} {seconds}")
            lines.append(f"kvrelay_store_seconds_count{{{labels}}} {count}")
        return lines


def counter_lines(report: Mapping[str, Any]) -> list[str]:
    """From `TieredStore.report`."""
    lines = ["# TYPE kvrelay_store_ops_total counter"]
    for one in report["ops"]:
        labels = f'tier="{one["tier"]}",op="{one["op"]}",outcome="{one["outcome"]}"'
        lines.append(f"kvrelay_store_ops_total{{{labels}}} {one['count']}")
    lines.append("# TYPE kvrelay_store_bytes_total counter")
    for one in report["bytes"]:
        labels = f'tier="{one["tier"]}",direction="{one["direction"]}"'
        lines.append(f"kvrelay_store_bytes_total{{{labels}}} {one['bytes']}")
    gauges = {"kvrelay_store_in_use": "in_use", "kvrelay_store_used_bytes": "used_bytes"}
    gauges["kvrelay_store_capacity_bytes"] = "capacity_bytes"
    for metric, member in gauges.items():
        known = {name: tier[member] for name, tier in report["tiers"].items() if tier[member] is not None}
        lines.append(f"# TYPE {metric} gauge")
        lines += [f'{metric}{{tier="{name}"}} {int(value)}' for name, value in known.items()]
    unannounced = {name: tier["unannounced_objects"] for name, tier in report["tiers"].items()}
    lines.append("# TYPE kvrelay_store_unannounced_objects_total counter")
    lines += [
        f'kvrelay_store_unannounced_objects_total{{tier="{name}"}} {count}'
        for name, count in unannounced.items()
        if count is not None
    ]
    lines += ["# TYPE kvrelay_store_phantoms_total counter", f"kvrelay_store_phantoms_total {report['phantoms']}"]
    return lines
