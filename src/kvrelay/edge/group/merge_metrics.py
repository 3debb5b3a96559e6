"""The /metrics pages of several processes as one page.

Counters and histograms add up. They must never fall, not even by the rounding of a sum in another order, or whoever
reads them takes that for a new start and counts everything twice. So what a process had counted when it died stays in
the sum, and sums are exact until they are printed. Gauges go by what they mean
(`merge` in the table of metrics); those of a process that does not answer are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, cast

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from kvrelay.edge.observe.metric_table import METRICS, Merge
from kvrelay.edge.observe.metrics import render

Key = tuple[str, tuple[tuple[str, str], ...]]  # name of the sample, its labels
Reduce = Callable[[Iterable[float]], float]


def _exact_sum(values: Iterable[float]) -> float:
    exact: Any = sum(map(Fraction, values))  # the library's type says float; it prints what `float()` makes of it
    return cast(float, exact)


_REDUCE: Mapping[Merge, Reduce] = {"sum": _exact_sum, "max": max, "min": min}


class Page:
    """One process's page, taken apart."""

    def __init__(self, text: str) -> None:
        """Raises ValueError for what is no such page."""
        self.families = {family.name: family for family in text_string_to_metric_families(text)}

    def counters(self) -> Mapping[str, Metric]:
        return {name: family for name, family in self.families.items() if family.type != "gauge"}


class GroupPages(Collector):
    """The last page of every process, and what processes that have died had counted."""

    def __init__(self) -> None:
        self._pages: dict[int, Page] = {}
        self._answering: dict[int, bool] = {}
        self._of_the_dead: list[Mapping[str, Metric]] = []
        self._facts: Callable[[], Iterable[Metric]] = tuple
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def bind(self, facts: Callable[[], Iterable[Metric]]) -> None:
        """What the group says of itself, asked at each reading."""
        self._facts = facts

    def take(self, process: int, text: str) -> None:
        """The process's present page. Raises ValueError."""
        self._pages[process] = Page(text)
        self._answering[process] = True

    def silent(self, process: int) -> None:
        """It did not answer: its counters stay, its gauges go."""
        self._answering[process] = False

    def died(self, process: int) -> None:
        """What it counted since its last page is lost, what it counted before stays."""
        page = self._pages.pop(process, None)
        self._answering.pop(process, None)
        if page is not None:
            kept = [*self._of_the_dead, page.counters()]
            self._of_the_dead = [{family.name: family for family in _summed(kept)}]

    def forget_worker(self, worker: str) -> None:
        """The worker was removed: its series go, also those of the dead."""
        for families in self._of_the_dead:
            for family in families.values():
                family.samples = [sample for sample in family.samples if sample.labels.get("worker") != worker]

    def render(self) -> bytes:
        return self.render_for("")[0]

    def render_for(self, accept: str) -> tuple[bytes, str]:
        """In the format that an Accept header asks for, with its content type."""
        return render(self._registry, accept)

    def collect(self) -> Iterator[Metric]:
        living = [page.counters() for page in self._pages.values()]
        yield from _summed([*living, *self._of_the_dead])
        yield from _gauges([page for process, page in self._pages.items() if self._answering[process]])
        yield from self._facts()


def _summed(pages: Sequence[Mapping[str, Metric]]) -> Iterator[Metric]:
    for name in dict.fromkeys(name for page in pages for name in page):
        yield _merged([page[name] for page in pages if name in page], _exact_sum)


def _gauges(pages: Sequence[Page]) -> Iterator[Metric]:
    names = dict.fromkeys(name for page in pages for name, family in page.families.items() if family.type == "gauge")
    for name in names:
        families = [page.families[name] for page in pages if name in page.families]
        yield _merged(families, _REDUCE[METRICS[name].merge if name in METRICS else "max"])


def _merged(families: Sequence[Metric], reduce: Reduce) -> Metric:
    """Samples in the order in which they are found: buckets of a histogram stay in theirs."""
    values: dict[Key, list[float]] = {}
    for family in families:
        for sample in family.samples:
            values.setdefault((sample.name, tuple(sorted(sample.labels.items()))), []).append(sample.value)
    merged = Metric(families[0].name, families[0].documentation, families[0].type)
    merged.samples = [Sample(name, dict(labels), reduce(found)) for (name, labels), found in values.items()]
    return merged
