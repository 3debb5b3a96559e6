"""A worker's Prometheus page in canonical words, whatever engine it is of.

Engines name one and the same thing differently, and releases rename it; what a page does not carry is None, which is
not zero. Every map states all canonical names, so that "this engine does not report it" is an entry and no omission.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from msgspec import Struct

from kvrelay.edge.connectors.base import ReportedLoad

# canonical name -> unit. Cache counters are in tokens: an engine that counts blocks or requests has no entry for them.
CANONICAL: dict[str, str] = {
    "running_requests": "requests",
    "waiting_requests": "requests",
    "kv_usage_ratio": "ratio, 0 to 1",
    "prefix_queries_tokens": "tokens, total",
    "prefix_hits_tokens": "tokens, total",
    "hits_by_tier_tokens": "tokens, total",
    "process_start_s": "seconds since the epoch",
    "cache_config": "labels",
}
_LINE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?[ \t]*$")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


class Sample(NamedTuple):
    labels: Mapping[str, str]
    value: float


class MappedMetric(Struct, frozen=True):
    """One canonical metric on one page. `name` is None where the page does not carry it: unavailable, not zero."""

    canonical: str
    unit: str
    name: str | None


class MetricsMap:
    """The names that one kind of engine has used, newest first; empty for what it never reports.

    `leaders`: labels of processes that share one cache, and which of them speaks for it.
    """

    def __init__(
        self,
        names: Mapping[str, tuple[str, ...]],
        *,
        rank_label: str = "",
        leaders: Mapping[str, str] | None = None,
    ) -> None:
        assert names.keys() == CANONICAL.keys(), f"not all stated: {CANONICAL.keys() ^ names.keys()}"
        self.names = names
        self._rank_label = rank_label
        self._leaders = leaders or {}
        self._canonical = {
            name + suffix: canonical
            for canonical, known in names.items()
            for name in known
            for suffix in ("", "_total")  # releases of the client library differ in it
        }
        self._prefixes = tuple({name.partition(":")[0] for known in names.values() for name in known})

    def is_spoken_on(self, text: str) -> bool:
        """Whether a page has metrics with this engine's prefix, known to us or not."""
        return any(f"{prefix}:" in text for prefix in self._prefixes if prefix not in self._canonical)

    def read(self, text: str) -> Page:
        """The page of one worker. Lines that are not samples, NaN and unknown names are passed over."""
        samples: dict[str, list[Sample]] = {}
        spelled: dict[str, str] = {}
        for name, labels, value in self._lines(text):
            if any(labels.get(label, leader) != leader for label, leader in self._leaders.items()):
                continue
            canonical = self._canonical[name]
            samples.setdefault(canonical, []).append(Sample(labels, value))
            spelled.setdefault(canonical, name)
        return Page(samples, spelled, self._rank_label)

    def _lines(self, text: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
        for line in text.splitlines():
            if not line.startswith(self._prefixes):
                continue
            match = _LINE.match(line)
            if match is None or match[1] not in self._canonical:
                continue
            try:
                value = float(match[3])
            except ValueError:
                continue
            if math.isfinite(value):
                yield match[1], _labels(match[2] or ""), value


class Page:
    """The samples of one page that have a canonical name."""

    def __init__(self, samples: Mapping[str, list[Sample]], spelled: Mapping[str, str], rank_label: str) -> None:
        self.samples = samples
        self._spelled = spelled
        self._rank_label = rank_label

    def mapped(self) -> tuple[MappedMetric, ...]:
        """Every canonical metric with the name that it has on this page."""
        return tuple(MappedMetric(name, unit, self._spelled.get(name)) for name, unit in CANONICAL.items())

    def loads(self) -> dict[int, ReportedLoad]:
        """Gauges per data-parallel rank."""
        names = ("running_requests", "waiting_requests", "kv_usage_ratio")
        ranks = sorted({self._rank(sample) for name in names for sample in self.samples.get(name, ())})
        return {
            rank: ReportedLoad(
                running_requests=whole(self.sum("running_requests", rank)),
                waiting_requests=whole(self.sum("waiting_requests", rank)),
                kv_usage_ratio=self._mean("kv_usage_ratio", rank),
            )
            for rank in ranks
        }

    def sum(self, name: str, rank: int | None = None) -> float | None:
        values = self._values(name, rank)
        return math.fsum(values) if values else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Totals per value of a label."""
        totals: dict[str, float] = {}
        for sample in self.samples.get(name, ()):
            if label in sample.labels:
                totals[sample.labels[label]] = totals.get(sample.labels[label], 0.0) + sample.value
        return totals

    def latest(self, name: str) -> float | None:
        values = self._values(name, None)
        return max(values) if values else None

    def _mean(self, name: str, rank: int) -> float | None:
        values = self._values(name, rank)
        return math.fsum(values) / len(values) if values else None

    def _values(self, name: str, rank: int | None) -> list[float]:
        return [sample.value for sample in self.samples.get(name, ()) if rank is None or self._rank(sample) == rank]

    def _rank(self, sample: Sample) -> int:
        label = sample.labels.get(self._rank_label, "0")
        return int(label) if label.isdigit() else 0


def increase(before: int | None, after: int | None) -> int | None:
    """Of a counter between two readings. After a reset the new total is all that is known to have been added."""
    if before is None or after is None:
        return None
    return after - before if after >= before else after


def whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _labels(text: str) -> Mapping[str, str]:
    return {
        name: re.sub(r"\\.", lambda found: _ESCAPES.get(found[0], found[0]), value)
        for name, value in _LABEL.findall(text)
    }
