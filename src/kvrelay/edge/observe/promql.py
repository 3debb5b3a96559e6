"""PromQL out of the table of metrics: a name or a label that the table does not have cannot be asked for."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.edge.observe.metric_table import METRICS

RATE = "$__rate_interval"  # Grafana puts a window in its place that fits zoom and scrape interval


def rate(name: str, *, by: Sequence[str] = (), where: str = "", window: str = RATE) -> str:
    return _sum(f"rate({_series(name, by, where)}[{window}])", by)


def increase(name: str, *, by: Sequence[str] = (), where: str = "", window: str = RATE) -> str:
    return _sum(f"increase({_series(name, by, where)}[{window}])", by)


def level(name: str, *, by: Sequence[str] = (), where: str = "") -> str:
    """Of a gauge."""
    assert METRICS[name].kind == "gauge", f"{name} is no gauge"
    return _sum(_series(name, by, where), by)


def quantile(name: str, q: float, *, by: Sequence[str] = (), where: str = "", window: str = RATE) -> str:
    assert METRICS[name].kind == "histogram", f"{name} is no histogram"
    _series(name, by, where)
    buckets = f"rate({name}_bucket{_braces(where)}[{window}])"
    return f"histogram_quantile({q:g}, sum by ({', '.join((*by, 'le'))}) ({buckets}))"


def observed(name: str, *, by: Sequence[str] = (), where: str = "", window: str = RATE) -> str:
    """How many values a histogram got."""
    assert METRICS[name].kind == "histogram", f"{name} is no histogram"
    _series(name, by, where)
    return _sum(f"increase({name}_count{_braces(where)}[{window}])", by)


def hit_ratio(window: str = RATE) -> str:
    """Hit tokens to those that could be hit, of requests whose hits are known."""
    hit = increase("kvrelay_actual_cached_tokens_total", window=window)
    return f"{hit} / {judged_tokens(window)}"


def judged_tokens(window: str = RATE) -> str:
    eligible = increase("kvrelay_eligible_tokens_total", window=window)
    return f"({eligible} - {increase('kvrelay_unaccounted_eligible_tokens_total', window=window)})"


def _series(name: str, by: Sequence[str], where: str) -> str:
    labels = METRICS[name].labels
    assert set(by) <= set(labels), f"{name} has no label {set(by) - set(labels)}"
    return f"{name}{_braces(where)}"


def _braces(where: str) -> str:
    return f"{{{where}}}" if where else ""


def _sum(expression: str, by: Sequence[str]) -> str:
    return f"sum by ({', '.join(by)}) ({expression})" if by else f"sum({expression})"
