"""Counters and histograms that cost next to nothing where things happen, and become Prometheus families when read.

An instrument knows its row of the table by name, so that no text and no label is written down twice.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Exemplar

from kvrelay.edge.observe.metric_table import METRICS

TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.4, 0.8, 1.6, 3.2)
E2E_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
DECISION_S = (1e-5, 2e-5, 5e-5, 1e-4, 1.5e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.1)
SESSION_S = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0, 21600.0)

MAX_EXEMPLAR_CHARS = 100  # of an id; the format allows 128 for name and value together
FOLD_AT = 4096  # values that may wait to be counted together

Labels = tuple[str, ...]


class Counter:
    """A number per combination of label values."""

    def __init__(self, name: str) -> None:
        spec = METRICS[name]
        assert spec.kind == "counter", f"{name} is a {spec.kind}"
        self.name = name
        self.labels = spec.labels
        self.values: dict[Labels, float] = {} if spec.labels else {(): 0}
        self._meaning = spec.meaning

    def add(self, values: Labels, amount: float = 1) -> None:
        self.values[values] = self.values.get(values, 0) + amount

    def total(self) -> float:
        return sum(self.values.values())

    def forget(self, label: str, value: str) -> None:
        if label in self.labels:
            at = self.labels.index(label)
            self.values = {values: number for values, number in self.values.items() if values[at] != value}

    def family(self) -> Metric:
        family = CounterMetricFamily(self.name.removesuffix("_total"), self._meaning, labels=self.labels)
        for values, number in list(self.values.items()):
            family.add_metric(values, number)
        return family


class _Buckets:
    """Of one series. `exemplars`: the last request that fell into each bucket, with its seconds."""

    __slots__ = ("counts", "exemplars", "sum_s")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.counts = [0] * (len(bounds) + 1)
        self.sum_s = 0.0
        self.exemplars: list[tuple[str, float] | None] = [None] * (len(bounds) + 1)


class Histogram:
    """Counts per bucket; `bounds` are upper limits in seconds. `series` are all its label values, known beforehand."""

    def __init__(self, name: str, bounds: Sequence[float], series: Iterable[Labels] = ((),)) -> None:
        spec = METRICS[name]
        assert spec.kind == "histogram", f"{name} is a {spec.kind}"
        self.name = name
        self.labels = spec.labels
        self.bounds = tuple(bounds)
        self._meaning = spec.meaning
        self._series = {values: _Buckets(bounds) for values in series}
        self._waiting_ms: list[float] = []

    def observe(self, seconds: float, request_id: str, values: Labels = ()) -> None:
        series = self._series[values]
        at = bisect_left(self.bounds, seconds)
        series.counts[at] += 1
        series.sum_s += seconds
        series.exemplars[at] = (request_id, seconds)

    def observe_all(self, milliseconds: Sequence[float]) -> None:
        """Many values of a histogram without labels, counted later and together; they come without exemplars."""
        self._waiting_ms.extend(milliseconds)
        if len(self._waiting_ms) >= FOLD_AT:
            self._fold()

    def family(self) -> Metric:
        self._fold()
        family = HistogramMetricFamily(self.name, self._meaning, labels=self.labels)
        limits = [repr(float(bound)) for bound in self.bounds] + ["+Inf"]
        for values, series in self._series.items():
            counts = accumulate(series.counts)
            exemplars: Any = map(_exemplar, series.exemplars)  # the library's type forgets that one may be missing
            family.add_metric(values, list(zip(limits, counts, exemplars, strict=True)), series.sum_s)
        return family

    def _fold(self) -> None:
        if not self._waiting_ms:
            return
        seconds = np.array(self._waiting_ms) / 1e3
        self._waiting_ms.clear()
        series = self._series[()]
        found = np.bincount(np.searchsorted(self.bounds, seconds), minlength=len(series.counts))
        series.counts = [before + more for before, more in zip(series.counts, found.tolist(), strict=True)]
        series.sum_s += float(seconds.sum())


def _exemplar(last: tuple[str, float] | None) -> Exemplar | None:
    """Ids may come from clients: one that is too long for the format is left out, not cut."""
    if last is None or len(last[0]) > MAX_EXEMPLAR_CHARS:
        return None
    return Exemplar({"request_id": last[0]}, last[1])
