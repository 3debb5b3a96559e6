"""A metrics page as numbers to ask for, and what happened between two of them.

The same page answers `doctor`, `status`, `top`, the live page and the rules, whether it was just collected in this
process or read over HTTP. A sample that is not on it is None, never zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

Labelled = tuple[Mapping[str, str], float]


class Readings:
    """One page, taken at `at_s` of whatever clock the caller keeps to."""

    def __init__(self, families: Iterable[Metric], at_s: float) -> None:
        self.at_s = at_s
        self._samples: dict[str, list[Labelled]] = {}
        for family in families:
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    self._samples.setdefault(sample.name, []).append((sample.labels, sample.value))

    def total(self, name: str, **labels: str) -> float | None:
        """Sum over all series with these labels."""
        values = [value for found, value in self._samples.get(name, ()) if _has(found, labels)]
        return math.fsum(values) if values else None

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Sums per value of one label."""
        sums: dict[str, float] = {}
        for found, value in self._samples.get(name, ()):
            if label in found and _has(found, labels):
                sums[found[label]] = sums.get(found[label], 0.0) + value
        return sums

    def series_count(self) -> int:
        return sum(map(len, self._samples.values()))


def read_page(text: str, at_s: float) -> Readings:
    """Raises ValueError for what is no metrics page."""
    return Readings(text_string_to_metric_families(text), at_s)


class Span:
    """From one reading to a later one; `before=None` is the moment at which everything was zero."""

    def __init__(self, before: Readings | None, after: Readings) -> None:
        self.before = before
        self.after = after

    @property
    def seconds(self) -> float | None:
        return None if self.before is None else self.after.at_s - self.before.at_s

    def increase(self, name: str, **labels: str) -> float | None:
        before = None if self.before is None else self.before.total(name, **labels)
        return _increase(before, self.after.total(name, **labels))

    def increase_by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        before = {} if self.before is None else self.before.by(name, label, **labels)
        after = self.after.by(name, label, **labels)
        return {value: _increase(before.get(value), now) or 0.0 for value, now in after.items()}

    def rate(self, name: str, **labels: str) -> float | None:
        """Per second."""
        more, seconds = self.increase(name, **labels), self.seconds
        return None if more is None or not seconds else more / seconds

    def quantile(self, name: str, q: float, **labels: str) -> float | None:
        """Of a histogram, interpolated within its bucket as Prometheus does; None where nothing was observed."""
        buckets = self.increase_by(f"{name}_bucket", "le", **labels)
        return quantile({float(limit): count for limit, count in buckets.items()}, q)

    def count(self, name: str, **labels: str) -> int:
        return round(self.increase(f"{name}_count", **labels) or 0)


def quantile(buckets: Mapping[float, float], q: float) -> float | None:
    """`buckets`: upper limit -> cumulative count."""
    limits = sorted(buckets.items())
    if not limits or limits[-1][1] <= 0:
        return None
    wanted = q * limits[-1][1]
    for (low, below), (high, upto) in pairwise([(0.0, 0.0), *limits]):
        if upto >= wanted and upto > below:
            return low if math.isinf(high) else low + (high - low) * (wanted - below) / (upto - below)
    return None


def _has(found: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return all(found.get(label) == value for label, value in wanted.items())


def _increase(before: float | None, after: float | None) -> float | None:
    """After a reset the new total is all that is known to have been added."""
    if after is None or before is None:
        return after
    return after - before if after >= before else after
