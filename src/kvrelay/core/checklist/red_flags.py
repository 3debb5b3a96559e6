"""Five ways in which a deployment that looks complete goes wrong without any error. Fail means red."""

from __future__ import annotations

from kvrelay.core.checklist.deployment import memory_cap, near_network, version_isolation
from kvrelay.core.checklist.dossier import Dossier
from kvrelay.core.checklist.item import Answer, Item, all_of, failed, passed, unknown
from kvrelay.core.doctor.finding import Verdict

STAGE = "redflags"


def _only_warm(dossier: Dossier) -> Answer:
    """Every report needs a part that began with empty caches, its own or another one's of the same trace."""
    reports: list[tuple[str, str, bool]] = []  # source, trace, began cold
    for run in dossier.runs:
        reports.append((run.source, run.trace_sha256, run.cold_start is True))
    for each in dossier.blocks:
        cold = any(block.before in ("reset", "restart") and block.requests for block in each.blocks)
        reports.append((each.source, each.trace_sha256, cold))
    if not reports:
        return unknown("there is no report")
    covered = {trace for _, trace, cold in reports if cold}
    warm = [source for source, trace, cold in reports if not cold and trace not in covered]
    if warm:
        return failed("only warm caches were measured: no part of the report began with empty ones", *warm)
    return passed("cold caches were measured as well", *(source for source, _, cold in reports if cold))


def _upgraded(dossier: Dossier) -> Answer:
    """Engine versions that were never held against ours, mixed versions, objects that this release does not read."""
    return all_of((_versions(dossier), _formats(dossier)))


def _versions(dossier: Dossier) -> Answer:
    found = (*dossier.finding("engine_version"), *dossier.finding("versions_equal"))
    bad = [finding for finding in found if finding.verdict in (Verdict.WARN, Verdict.FAIL)]
    if bad:
        return failed("; ".join(f"{one.worker or 'fleet'}: {one.detail}" for one in bad), "kvrelay doctor")
    good = [finding for finding in found if finding.verdict is Verdict.OK and finding.worker is not None]
    if not good or any(finding.verdict is Verdict.UNKNOWN for finding in found):
        return unknown("no worker could be asked for its version")
    return passed("; ".join(f"{one.worker}: {one.detail}" for one in good), "kvrelay doctor")


def _formats(dossier: Dossier) -> Answer:
    if not dossier.deployment.tiers:
        return passed("no tier keeps objects over an upgrade", *dossier.deployment.sources)
    if not dossier.formats:
        return unknown("the objects in the tiers were not looked at", *dossier.deployment.sources)
    parts = []
    for each in dossier.formats:
        if each.problem is not None:
            parts.append(unknown(f"{each.tier}: {each.problem}"))
        elif each.foreign:
            listed = ", ".join(f"{count} of {what}" for what, count in each.foreign)
            parts.append(failed(f"{each.tier}: {listed}, of {each.looked_at} objects looked at"))
        else:
            parts.append(passed(f"{each.tier}: {each.looked_at} objects looked at, all readable"))
    return all_of(parts)


RED_FLAGS = (
    Item(
        code="mixed_versions",
        stage=STAGE,
        asks="Could KV of one model version reach another one while an update rolls?",
        todo="kvrelay drill run rolling-update store-revisions --out drills; rotate the epoch with every revision.",
        judge=version_isolation,
    ),
    Item(
        code="remote_slower",
        stage=STAGE,
        asks="Is the remote tier slower than computing, or in another region?",
        todo="Move it next to the workers or take it out; hits from it cost more than they save.",
        judge=near_network,
    ),
    Item(
        code="memory_limit",
        stage=STAGE,
        asks="Do caches in host memory come near what the machine has?",
        todo="Lower them; when memory ends, the kernel ends a worker.",
        judge=memory_cap,
    ),
    Item(
        code="only_warm",
        stage=STAGE,
        asks="Were only warm caches measured?",
        todo="kvrelay replay preset:cold_warm_restart, or a replay whose arms are reset.",
        judge=_only_warm,
    ),
    Item(
        code="unchecked_upgrade",
        stage=STAGE,
        asks="Was an engine or kvrelay upgraded without a look at compatibility?",
        todo="kvrelay doctor names untested versions; kvrelay store purge removes objects of other formats.",
        judge=_upgraded,
    ),
)
