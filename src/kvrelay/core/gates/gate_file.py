"""Gates as they are written before a run: a TOML file, parsed into values that cannot be wrong.

title = "cache_load instead of round_robin"
candidate = "cache_load"
baseline = "round_robin"
baseline_run = "5f0c..."        # manifest digest of the own run from which the thresholds were taken

[[gate]]
name = "p95 TTFT keeps its SLO"
metric = "ttft_p95_ms"
at_most = 600

[[gate]]
name = "turns wait less than under the baseline, in every bucket"
paired = "ttft_ms"
over = "every_bucket"
at_most_ratio = 1.0

[[gate]]
name = "faster, with real hits, in safe memory"
all = [
  { metric = "ttft_p95_ms", at_most_ratio = 0.9 },
  { metric = "hits_disagree_ratio", at_most = 0.01 },
  { metric = "kv_usage_peak_ratio", at_most = 0.95 },
]
"""

from __future__ import annotations

import difflib
import hashlib
import re
import tomllib
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from msgspec import Struct

from kvrelay.core.gates.metrics import METRICS, PAIRED_METRICS

THIS_RUN = "this-run"
_DIGEST = re.compile(r"^[0-9a-f]{12,64}$")
_OVER = ("all", "every_bucket", "no_bucket_worse")
_LIMITS = ("at_most", "at_least", "at_most_ratio", "at_least_ratio")
_FREE_OF_BASELINE = ("failed_requests", "failed_ratio", "retries_ratio", "task_success_ratio", "hits_disagree_ratio")
"""Limits on these need no measurement to come from: a budget of failures is a decision."""


class GateError(Exception):
    """The file cannot be used: where, what was found there, what would be legal, and the nearest legal name if any."""

    def __init__(self, where: str, found: str, legal: str, nearest: str | None = None) -> None:
        super().__init__(f"{where}: {found}; legal: {legal}")
        self.where, self.found, self.legal, self.nearest = where, found, legal, nearest


class Limit(Struct, frozen=True):
    """`metric` of one arm against a number, or against the same metric of another arm (`ratio`)."""

    metric: str
    value: float
    at_most: bool
    ratio: bool
    arm: str | None = None  # None: the candidate
    relative_to: str | None = None  # None: the baseline; only with `ratio`


class PairedLimit(Struct, frozen=True):
    """The ratio candidate / baseline of paired measurements: its whole interval has to keep the limit."""

    paired: str
    value: float
    over: str = "all"


class AllOf(Struct, frozen=True):
    """Passes when every part passes in the same run; one part that fails or is unknown decides it."""

    parts: tuple[Limit | PairedLimit, ...]


Condition = Limit | PairedLimit | AllOf


class Gate(Struct, frozen=True):
    name: str
    condition: Condition


class Edges(Struct, frozen=True):
    """Upper bounds of the buckets, ascending; empty: cut where thirds (prefix) and halves (load) of the pairs lie."""

    prefix_tokens: tuple[int, ...] = ()
    in_flight: tuple[float, ...] = ()


class GateFile(Struct, frozen=True):
    title: str
    candidate: str
    baseline: str
    baseline_run: str
    gates: tuple[Gate, ...]
    edges: Edges
    digest: str  # sha256 of the file's bytes


def parse_gates(text: bytes) -> GateFile:
    """Raises GateError."""
    try:
        table = tomllib.loads(text.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise GateError("the file", str(problem), "TOML in UTF-8") from problem
    _known(table, ("title", "candidate", "baseline", "baseline_run", "gate", "buckets"), "the file")
    gates = tuple(_gate(item, f"gate {number}") for number, item in enumerate(_list(table, "gate"), start=1))
    if not gates:
        raise GateError("the file", "no gate", "one [[gate]] table or more")
    found = GateFile(
        title=_text(table, "title", "the file"),
        candidate=_text(table, "candidate", "the file"),
        baseline=_text(table, "baseline", "the file"),
        baseline_run=_text(table, "baseline_run", "the file"),
        gates=gates,
        edges=_edges(table.get("buckets", {})),
        digest=hashlib.sha256(text).hexdigest(),
    )
    _check_baseline(found)
    return found


def limits_of(condition: Condition) -> tuple[Limit | PairedLimit, ...]:
    return condition.parts if isinstance(condition, AllOf) else (condition,)


def _check_baseline(file: GateFile) -> None:
    """A number needs an own measurement that it comes from; somebody else's percentages are no thresholds."""
    if file.candidate == file.baseline:
        raise GateError("`baseline`", f"`{file.baseline}`, which is the candidate", "another arm")
    if file.baseline_run != THIS_RUN and not _DIGEST.match(file.baseline_run):
        legal = f"the manifest digest of an earlier run of yours (12 to 64 hex digits), or `{THIS_RUN}`"
        raise GateError("`baseline_run`", f"`{file.baseline_run}`", legal)
    if file.baseline_run != THIS_RUN:
        return
    for gate in file.gates:
        for limit in limits_of(gate.condition):
            if isinstance(limit, Limit) and not limit.ratio and limit.metric not in _FREE_OF_BASELINE:
                raise GateError(
                    f"gate `{gate.name}`",
                    f"a number for `{limit.metric}` while `baseline_run` is `{THIS_RUN}`",
                    "`at_most_ratio` or `at_least_ratio`, or the digest of the own run that the number comes from",
                )


def _gate(item: Any, where: str) -> Gate:
    if not isinstance(item, Mapping):
        raise GateError(where, f"`{item}`", "a table")
    name = _text(item, "name", where)
    rest = {key: value for key, value in item.items() if key != "name"}
    where = f"gate `{name}`"
    if "all" not in rest:
        return Gate(name, _limit(rest, where))
    _known(rest, ("all",), where)
    parts = [_limit(part, f"{where}, part {number}") for number, part in enumerate(_list(rest, "all"), start=1)]
    if len(parts) < 2:
        raise GateError(where, f"`all` of {len(parts)}", "two parts or more")
    return Gate(name, AllOf(tuple(parts)))


def _limit(item: Any, where: str) -> Limit | PairedLimit:
    if not isinstance(item, Mapping):
        raise GateError(where, f"`{item}`", "a table with `metric` or `paired`, and a limit")
    if "paired" in item:
        _known(item, ("paired", "over", "at_most_ratio"), where)
        over = item.get("over", "all")
        paired = _name(item["paired"], PAIRED_METRICS, f"{where}, `paired`")
        return PairedLimit(paired, _number(item, "at_most_ratio", where), _name(over, _OVER, f"{where}, `over`"))
    _known(item, ("metric", "arm", "relative_to", *_LIMITS), where)
    if "metric" not in item:
        raise GateError(where, "neither `metric` nor `paired`", "one of the two")
    metric = _name(item["metric"], METRICS, f"{where}, `metric`")
    named = [limit for limit in _LIMITS if limit in item]
    if len(named) != 1:
        raise GateError(where, f"{len(named)} limits", f"exactly one of {', '.join(f'`{one}`' for one in _LIMITS)}")
    if "relative_to" in item and not named[0].endswith("_ratio"):
        raise GateError(where, f"`relative_to` with `{named[0]}`", "`at_most_ratio` or `at_least_ratio`")
    return Limit(
        metric=metric,
        value=_number(item, named[0], where),
        at_most=named[0].startswith("at_most"),
        ratio=named[0].endswith("_ratio"),
        arm=_text(item, "arm", where) if "arm" in item else None,
        relative_to=_text(item, "relative_to", where) if "relative_to" in item else None,
    )


def _edges(table: Any) -> Edges:
    if not isinstance(table, Mapping):
        raise GateError("`buckets`", f"`{table}`", "a table")
    _known(table, ("prefix_tokens", "in_flight"), "`buckets`")
    prefix, load = (_ascending(table.get(name, []), name) for name in ("prefix_tokens", "in_flight"))
    return Edges(tuple(int(edge) for edge in prefix), load)


def _ascending(values: Any, name: str) -> tuple[float, ...]:
    legal = "numbers above 0 that grow, such as [512, 4096]"
    if not isinstance(values, list) or not all(_is_number(value) and value > 0 for value in values):
        raise GateError(f"`buckets.{name}`", f"`{values}`", legal)
    if any(a >= b for a, b in pairwise(values)):
        raise GateError(f"`buckets.{name}`", f"`{values}`", legal)
    return tuple(float(value) for value in values)


def _known(item: Mapping[str, Any], legal: Iterable[str], where: str) -> None:
    for key in item:
        _name(key, tuple(legal), where, what="unknown key ")


def _name(value: Any, legal: Iterable[str], where: str, *, what: str = "") -> str:
    names = tuple(legal)
    if value in names:
        return str(value)
    nearest = difflib.get_close_matches(str(value), names, 1)
    raise GateError(
        where, f"{what}`{value}`", ", ".join(f"`{name}`" for name in names), nearest[0] if nearest else None
    )


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not value.strip():
        found = "missing" if value is None else f"`{value}`"
        raise GateError(f"{where}, `{name}`", found, "a text")
    return value


def _number(item: Mapping[str, Any], name: str, where: str) -> float:
    value: Any = item.get(name)
    if not _is_number(value) or value < 0:
        raise GateError(f"{where}, `{name}`", "missing" if value is None else f"`{value}`", "a number, 0 or more")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _list(item: Mapping[str, Any], name: str) -> list[Any]:
    value = item.get(name, [])
    if not isinstance(value, list):
        raise GateError(f"`{name}`", f"`{value}`", "a list of tables")
    return value
