"""vLLM's metrics page in canonical words.

Releases differ in the `_total` suffix and in which metrics exist; a data-parallel worker repeats each one with another
`engine` label. What is not on the page is None, which is not zero.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kvrelay.edge.connectors.base import ReportedLoad, Scrape

# canonical name -> the names that engines have used for it
NAMES: dict[str, tuple[str, ...]] = {
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "prefix_queries": ("vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries"),
    "prefix_hits": ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits"),
    "process_start": ("process_start_time_seconds",),
    "cache_config": ("vllm:cache_config_info",),
}
_CANONICAL = {
    name + suffix: canonical for canonical, names in NAMES.items() for name in names for suffix in ("", "_total")
}
_LINE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?[ \t]*$")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


class Sample(NamedTuple):
    labels: Mapping[str, str]
    value: float


class Page:
    """The samples of one page that have a canonical name."""

    def __init__(self, samples: Mapping[str, list[Sample]]) -> None:
        self.samples = samples

    def scrape(self) -> Scrape:
        return Scrape(
            ranks={rank: self._load_of(rank) for rank in self._ranks()},
            process_start_s=self._single("process_start"),
            prefix_queries_tokens=_whole(self._sum("prefix_queries")),
            prefix_hits_tokens=_whole(self._sum("prefix_hits")),
        )

    def cache_block_size_tokens(self) -> int | None:
        """From the labels of `cache_config_info`; ranks of one worker share one block size."""
        sizes = {sample.labels.get("block_size", "") for sample in self.samples.get("cache_config", ())}
        if len(sizes) != 1:
            return None
        text = sizes.pop()
        return int(text) if text.isdigit() and int(text) > 0 else None

    def _ranks(self) -> list[int]:
        names = ("running", "waiting", "kv_usage")
        return sorted({_rank(sample) for name in names for sample in self.samples.get(name, ())})

    def _load_of(self, rank: int) -> ReportedLoad:
        return ReportedLoad(
            running_requests=_whole(self._sum("running", rank)),
            waiting_requests=_whole(self._sum("waiting", rank)),
            kv_usage_ratio=self._mean("kv_usage", rank),
        )

    def _values(self, name: str, rank: int | None) -> list[float]:
        samples = self.samples.get(name, ())
        return [sample.value for sample in samples if rank is None or _rank(sample) == rank]

    def _sum(self, name: str, rank: int | None = None) -> float | None:
        values = self._values(name, rank)
        return math.fsum(values) if values else None

    def _mean(self, name: str, rank: int | None = None) -> float | None:
        values = self._values(name, rank)
        return math.fsum(values) / len(values) if values else None

    def _single(self, name: str) -> float | None:
        values = self._values(name, None)
        return max(values) if values else None


def read_page(text: str) -> Page:
    """The page of one worker. Lines that are not samples, NaN and unknown names are passed over."""
    samples: dict[str, list[Sample]] = {}
    for name, labels, value in _lines(text):
        samples.setdefault(name, []).append(Sample(labels, value))
    return Page(samples)


def increase(before: int | None, after: int | None) -> int | None:
    """Of a counter between two readings. After a reset the new total is all that is known to have been added."""
    if before is None or after is None:
        return None
    return after - before if after >= before else after


def _lines(text: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
    for line in text.splitlines():
        if not line.startswith(("vllm:", "process_start")):
            continue
        match = _LINE.match(line)
        canonical = _CANONICAL.get(match[1]) if match else None
        if match is None or canonical is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if math.isfinite(value):
            yield canonical, _labels(match[2] or ""), value


def _labels(text: str) -> Mapping[str, str]:
    return {
        name: re.sub(r"\\.", lambda found: _ESCAPES.get(found[0], found[0]), value)
        for name, value in _LABEL.findall(text)
    }


def _rank(sample: Sample) -> int:
    engine = sample.labels.get("engine", "0")
    return int(engine) if engine.isdigit() else 0


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
