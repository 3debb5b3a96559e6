"""Questions about what is to be deployed: what shares KV, how much memory it takes, how far it is, who may read it."""

from __future__ import annotations

from kvrelay.core.checklist.dossier import Dossier, ProbeEvidence
from kvrelay.core.checklist.item import Answer, Item, all_of, distinct, failed, passed, unknown
from kvrelay.core.doctor.finding import Verdict
from kvrelay.core.gates.judge import Outcome
from kvrelay.core.sizing.breakeven import Link, Prefill, breakeven_tokens, point

STAGE = "prelaunch"
FAR_S = 0.010
"""A round trip that takes longer has not stayed in one datacentre: there it takes a fraction of a millisecond."""

ISOLATION_DRILLS = ("rolling-update", "rotation-revision", "store-revisions")


def architecture(dossier: Dossier) -> Answer:
    """Which of the ways to share KV, and whether the traffic has anything to gain from it."""
    deployment = dossier.deployment
    media = {tier.medium for tier in dossier.shared_tiers}
    ways = []
    if media - {"peer"}:
        ways.append("remote store")
    if "peer" in media:
        ways.append("peer to peer")
    if {"prefill", "decode"} & set(deployment.roles):
        ways.append("prefill/decode split")
    named = " and ".join(ways)
    if len(ways) > 1:
        return failed(f"{named} at once: if it gets worse, nobody can tell by which", *deployment.sources)
    if not ways:
        return passed("nothing is shared between hosts", *deployment.sources)
    lost = [(run, arm) for run in dossier.runs for arm in run.arms if "remote" not in arm.added and arm.eligible_tokens]
    if not lost:
        return unknown(f"{named}: no run without it says what there is to gain", *deployment.sources)
    run, arm = max(lost, key=lambda one: one[1].route_loss_tokens / one[1].eligible_tokens)
    share = arm.route_loss_tokens / arm.eligible_tokens
    said = f"{named}: under {arm.name} {share:.1%} of the reusable tokens were computed though another worker held them"
    if not arm.route_loss_tokens:
        return failed(f"{named}, and under no policy a token was lost because another worker held it", run.source)
    return passed(said, *deployment.sources, run.source)


def memory_cap(dossier: Dossier) -> Answer:
    """What caches may take of the host, stated and running."""
    parts = []
    for asker, verdict in dossier.deployment.memory:
        said = f"{asker}: {_gb(verdict.asked_bytes)} of at most {_gb(verdict.most_bytes)}"
        parts.append((passed if verdict.safe else failed)(said, *dossier.deployment.sources))
    for finding in dossier.finding("memory"):
        if finding.verdict in (Verdict.OK, Verdict.FAIL):
            parts.append((passed if finding.verdict is Verdict.OK else failed)(f"doctor: {finding.detail}"))
    parts += [failed(f"doctor: {f.detail}") for f in dossier.finding("memory_left") if f.verdict is Verdict.FAIL]
    if parts:
        return all_of(parts)
    if not dossier.deployment.tiers and dossier.facts is not None:
        return passed("no cache in host memory is configured", *dossier.deployment.sources)
    return unknown("nothing says how much memory caches may take", *dossier.deployment.sources)


def near_network(dossier: Dossier) -> Answer:
    """Is every shared tier near, and is fetching from it quicker than computing?"""
    if not dossier.shared_tiers:
        return passed("nothing is fetched from elsewhere", *dossier.deployment.sources)
    if not dossier.probes:
        return unknown("no shared tier was measured", *dossier.deployment.sources)
    return all_of([_probed(dossier, probe) for probe in dossier.probes])


def _probed(dossier: Dossier, probe: ProbeEvidence) -> Answer:
    link = probe.link
    if link is None and probe.connect_s is None:
        return unknown(f"{probe.tier}: {probe.problem or 'not measured'}", probe.url)
    round_trip_s = probe.connect_s if link is None or probe.connect_s is not None else link.latency_s
    assert round_trip_s is not None, "either was measured"
    said = f"{probe.tier}: round trip {round_trip_s * 1e3:.2f} ms"
    if link is not None:
        said += f", a small read {link.latency_s * 1e3:.2f} ms, {link.bytes_per_s / 1e9:.2f} GB/s"
    if round_trip_s > FAR_S:
        return failed(f"{said}: another datacentre or region (more than {FAR_S * 1e3:.0f} ms)", probe.url)
    if link is None:
        return unknown(f"{said}; its bandwidth cannot be measured from here", probe.url)
    if not dossier.rates or dossier.limits.kv_bytes_per_token is None:
        lacking = "prefill rate" if not dossier.rates else "KV bytes per token"
        return unknown(f"{said}; without a {lacking} nobody can tell whether fetching beats computing", probe.url)
    return _against_computing(dossier, probe, link, dossier.rates[-1], dossier.limits.kv_bytes_per_token, said)


def _against_computing(
    dossier: Dossier, probe: ProbeEvidence, link: Link, rate: Prefill, bytes_per_token: float, said: str
) -> Answer:
    """Against the fastest worker: where it loses to computing there, it does not pay."""
    tokens = dossier.limits.prefix_tokens
    at = point(tokens, link, rate, bytes_per_token=bytes_per_token)
    least = breakeven_tokens(link, rate, bytes_per_token=bytes_per_token)
    compared = (
        f"{said}; {tokens:,} tokens: fetched in {at.fetch_s * 1e3:.1f} ms, computed in {at.compute_s * 1e3:.1f} ms"
    )
    if least is None:
        return failed(f"{compared}: fetching never pays at this bandwidth", probe.url)
    if not at.fetch:
        return failed(f"{compared}: it pays from {least:,} tokens on", probe.url)
    return passed(f"{compared}: it pays from {least:,} tokens on", probe.url)


def version_isolation(dossier: Dossier) -> Answer:
    """Can KV of one revision be read by another, and does a rotation put an end to the old one?"""
    if not dossier.shared_tiers:
        return passed("nothing is shared, so nothing can be mixed", *dossier.deployment.sources)
    if dossier.deployment.keys_lack_revision is not None:
        return failed(dossier.deployment.keys_lack_revision, *dossier.deployment.sources)
    return all_of((_keys(dossier), rotation(dossier)))


def _keys(dossier: Dossier) -> Answer:
    if dossier.contract_blind:
        return failed(f"keys are the same although {', '.join(dossier.contract_blind)} differ")
    return passed("every member of the contract changes every key (tried just now)")


def rotation(dossier: Dossier) -> Answer:
    found = dossier.drilled(*ISOLATION_DRILLS)
    sources = distinct([drill.source] for drill in found)
    broken = [drill for drill in found if drill.verdict == Outcome.FAIL]
    if broken:
        return failed(f"{broken[0].drill}: {'; '.join(broken[0].broken[:2]) or 'failed'}", *sources)
    good = [f"{drill.drill} ({drill.fleet})" for drill in found if drill.verdict == Outcome.PASS]
    if not good:
        return unknown(f"none of the drills {', '.join(ISOLATION_DRILLS)} has passed", *sources)
    return passed(f"no hit across versions in {', '.join(dict.fromkeys(good))}", *sources)


def _gb(amount_bytes: float) -> str:
    return f"{amount_bytes / 1e9:.1f} GB"


PRELAUNCH = (
    Item(
        code="architecture",
        stage=STAGE,
        asks="Which architecture shares KV (remote store, prefill/decode split, peers), and what can the traffic gain?",
        todo="Name one, and replay the trace without it: `route` losses in the report are what sharing can bring.",
        judge=architecture,
    ),
    Item(
        code="memory_cap",
        stage=STAGE,
        asks="Are caches in host memory clearly smaller than the host, with engine and buffer taken off?",
        todo="Lower the cache; `kvrelay size --host-gb --engine-gb --cache-gb` says what is safe.",
        judge=memory_cap,
    ),
    Item(
        code="near_network",
        stage=STAGE,
        asks="Is the shared tier on the same low-latency network, and quicker than computing?",
        todo="Move it next to the workers; state --kv-bytes-per-token and --prefill-tokens-per-s or --router.",
        judge=near_network,
    ),
    Item(
        code="version_isolation",
        stage=STAGE,
        asks="Is shared KV kept apart by model revision, and does an upgrade put an end to the old?",
        todo="kvrelay drill run rolling-update rotation-revision store-revisions --out drills",
        judge=version_isolation,
    ),
)
