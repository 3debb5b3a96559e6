"""Is a manifest whole, and may two of them be put into one set of results?

It works on the raw object, so that a member that somebody took out is missing and not defaulted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

_STATED = (
    "kvrelay", "commit", "index_version", "events_version", "trace.sha256", "trace.requests_retained", "plan.sha256",
    "plan.primer_sha256", "plan.seed", "fleet.workers", "fleet.engines", "fleet.kv_tiers", "fleet.topology",
    "fleet.hardware", "fleet.layer", "fleet.model.name", "fleet.model.revision", "fleet.model.tokenizer_sha256",
    "fleet.model.chat_template_sha256", "settings.reset", "settings.order", "order", "host.python",
)  # fmt: skip
_PROCESS = ("name", "role", "pid", "urls", "log", "version")
_WORKER = ("incarnation", "hardware", "gpu_uuids", "block_size_tokens", "router_block_size_tokens")
_REVISION = re.compile(r"^([0-9a-f]{40}|content:[0-9a-f]{64})$")
_SAME_IN_A_SET = (
    ("engine versions", "fleet.engines"),
    ("layers", "fleet.layer"),
    ("hardware", "fleet.hardware"),
    ("models", "fleet.model"),
    ("block sizes", "fleet.block_sizes_tokens"),
    ("traces", "trace.sha256"),
    ("plans", "plan.sha256"),
    ("versions of the router", "commit"),
    ("resets", "settings.reset"),
    ("primers", "plan.primer_sha256"),
)


class Gap(Struct, frozen=True):
    """`where` in the manifest something is missing or wrong."""

    where: str
    problem: str


class MergeRefused(Exception):
    """The two runs are of different stacks; `reasons` has one line for each difference."""

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = tuple(reasons)


def gaps(manifest: Mapping[str, Any]) -> tuple[Gap, ...]:
    """Everything that is missing; empty when the manifest is whole."""
    return tuple(_gaps(manifest))


def merged(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """Both runs' arms under what both stated. Raises MergeRefused when they did not state the same stack."""
    reasons = [
        f"different {what}: {_said(_at(left, f'stated.{path}'))} and {_said(_at(right, f'stated.{path}'))}"
        for what, path in _SAME_IN_A_SET
        if _at(left, f"stated.{path}") != _at(right, f"stated.{path}")
    ]
    for side, one in (("first", left), ("second", right)):
        reasons += [f"the {side} manifest is not whole: {gap.where}" for gap in gaps(one)[:1]]
    if reasons:
        raise MergeRefused(reasons)
    digests = sorted({str(left["digest"]), str(right["digest"])})
    if len(digests) == 1:
        raise MergeRefused([f"both are the run {digests[0][:12]}"])
    return {"merged_from": digests, "stated": left["stated"], "observed": [*left["observed"], *right["observed"]]}


def _gaps(manifest: Mapping[str, Any]) -> Iterator[Gap]:
    for path in ("digest", *(f"stated.{one}" for one in _STATED)):
        if _missing(_at(manifest, path)):
            yield Gap(path, "missing")
    revision = _at(manifest, "stated.fleet.model.revision")
    if revision is not None and not _REVISION.match(str(revision)):
        yield Gap("stated.fleet.model.revision", f"`{revision}` is neither a full commit nor a digest of the weights")
    observed = manifest.get("observed") or []
    if not observed:
        yield Gap("observed", "no arm was run")
    for arm in observed:
        yield from _arm_gaps(arm)


def _arm_gaps(arm: Mapping[str, Any]) -> Iterator[Gap]:
    at = f"observed[{arm.get('arm', '?')}]"
    for name in ("started_s", "isolation", "schedule_sha256", "primer_sha256", "config_sha256"):
        if _missing(arm.get(name)):
            yield Gap(f"{at}.{name}", "missing")
    processes = arm.get("processes") or []
    if not any(process.get("role") == "router" for process in processes):
        yield Gap(f"{at}.processes", "no router")
    if not any(process.get("role") == "worker" for process in processes):
        yield Gap(f"{at}.processes", "no worker")
    for process in processes:
        wanted = (*_PROCESS, *(_WORKER if process.get("role") == "worker" else ()))
        here = f"{at}.processes[{process.get('name', '?')}]"
        for name in wanted:
            if process.get(name) is None or process.get(name) == "":
                yield Gap(f"{here}.{name}", "missing")
        said, used = process.get("block_size_tokens"), process.get("router_block_size_tokens")
        if said is not None and used is not None and said != used:
            yield Gap(f"{here}.router_block_size_tokens", f"{used}, while the engine says {said}")
        if process.get("hardware") == "gpu" and not process.get("gpu_uuids"):
            yield Gap(f"{here}.gpu_uuids", "missing for a GPU")


def _missing(value: Any) -> bool:
    return value is None or value in ("", [], {}, ())


def _at(manifest: Mapping[str, Any], path: str) -> Any:
    found: Any = manifest
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _said(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
