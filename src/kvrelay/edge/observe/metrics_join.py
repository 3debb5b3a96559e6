"""Receipts beside /metrics: both count the same requests, so their totals must agree.

A counter that is missing from the page leaves its comparison unknown; it is never taken for zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal

from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from kvrelay.core.receipts.receipt import Receipt

TOLERANCE_RATIO = 0.01

Verdict = Literal["pass", "fail", "unknown"]


class Comparison(Struct, frozen=True):
    """One total from both sides."""

    metric: str
    receipts_total: float
    metrics_total: float | None
    verdict: Verdict


def totals_of_page(text: str) -> Mapping[str, float]:
    """Sum over all labels of every counter on a metrics page. Raises ValueError for what is no such page."""
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        if family.type == "counter":
            values = [sample.value for sample in family.samples if sample.name.endswith("_total")]
            if values:
                totals[f"{family.name}_total"] = math.fsum(values)
    return totals


def compare(
    receipts: Iterable[Receipt], after: Mapping[str, float], before: Mapping[str, float] | None = None
) -> list[Comparison]:
    """Totals of the receipts against the increase between two pages, or against one page since the start."""
    return [
        _comparison(metric, total, _increase(metric, after, before))
        for metric, total in _totals_of_receipts(receipts).items()
    ]


def _totals_of_receipts(receipts: Iterable[Receipt]) -> Mapping[str, float]:
    requests = claimed = actual = eligible = lost = 0
    for receipt in receipts:
        requests += 1
        claimed += sum((receipt.matched_tiers_at_route or {}).values())
        actual += receipt.actual_cached_tokens or 0
        eligible += receipt.eligible_prefix_tokens or 0
        lost += receipt.gate_loss_tokens.total if receipt.gate_loss_tokens else 0
    return {
        "kvrelay_requests_total": requests,
        "kvrelay_claimed_tokens_total": claimed,
        "kvrelay_actual_cached_tokens_total": actual,
        "kvrelay_eligible_tokens_total": eligible,
        "kvrelay_gate_loss_tokens_total": lost,
    }


def _increase(metric: str, after: Mapping[str, float], before: Mapping[str, float] | None) -> float | None:
    if metric not in after:
        return None
    return after[metric] - (before.get(metric, 0) if before is not None else 0)


def _comparison(metric: str, receipts_total: float, metrics_total: float | None) -> Comparison:
    if metrics_total is None:
        # a labelled counter has no sample before its first count, so nothing counted is nothing to find
        return Comparison(metric, receipts_total, None, "pass" if receipts_total == 0 else "unknown")
    within = math.isclose(receipts_total, metrics_total, rel_tol=TOLERANCE_RATIO)
    return Comparison(metric, receipts_total, metrics_total, "pass" if within else "fail")
