"""The figures of a run in the shape that page and text show: tables as text, charts as rows of plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from kvrelay.core.gates.evidence import Layer
from kvrelay.core.stats.distribution import distribution
from kvrelay.lab.arms.measure import Measured
from kvrelay.lab.arms.results import ArmData, PolicyResult, hit_ratio
from kvrelay.lab.arms.ruling import Run
from kvrelay.lab.report.chart import Chart
from kvrelay.lab.report.charts import charts_of, claimed_minus_actual
from kvrelay.lab.report.limitations import limitations
from kvrelay.lab.report.story import receipt_in_words
from kvrelay.lab.report.table import Origin, Table, milliseconds, percent, times, tokens
from kvrelay.lab.report.verdict_view import VerdictView, together_table, verdict_view

FIRST_REQUESTS = 5  # of a worker after its start
WORDS = {
    "mock": "modelled times on mock workers, not the performance of any engine",
    "single_worker_baseline": "one worker: a baseline, nothing was routed",
    "routing_result": "two or more real workers",
}


class View(Struct, frozen=True):
    title: str
    label: str
    label_words: str
    verdict: VerdictView
    overview: Table
    together: Table
    charts: tuple[Chart, ...]
    failures: Table
    first_wave: Table
    receipt_words: str
    arms: Table
    counters: Table
    facts: tuple[tuple[str, str], ...]
    limitations: tuple[str, ...]
    manifest_json: str
    policies: tuple[str, ...]
    workers: tuple[str, ...]


def view_of(run: Run) -> View:
    measured, ruling = run.measured, run.ruling
    stated = measured.manifest.stated
    return View(
        title=f"{len(measured.results)} routing policies, one trace: {stated.trace.name}",
        label=f"{stated.label}, {stated.trace.label}" if stated.trace.label else stated.label,
        label_words=WORDS[stated.label],
        verdict=verdict_view(measured, ruling),
        overview=overview_table(measured.results, winner=ruling.ranking.winner, time=_time(measured)),
        together=together_table(measured, ruling),
        charts=charts_of(measured, ruling),
        failures=failures_table(measured),
        first_wave=first_wave_table(measured),
        receipt_words=receipt_in_words(measured),
        arms=_arms_table(measured),
        counters=_counters_table(measured),
        facts=_facts(measured),
        limitations=limitations(measured),
        manifest_json=msgspec.json.format(msgspec.json.encode(measured.manifest), indent=2).decode(),
        policies=tuple(measured.results),
        workers=measured.arms[0].workers if measured.arms else (),
    )


def overview_table(results: Mapping[str, PolicyResult], *, winner: str | None, time: Origin = Origin.MEASURED) -> Table:
    header = (
        "policy", "requests", "failed", "TTFT p50 ms", "TTFT p95 ms", "session wall p50 ms", "claimed tokens",
        "actual hit tokens", "claimed - actual", "hit rate", "recomputed tokens", "busiest / mean load",
    )  # fmt: skip
    rows = [
        (
            f"{policy} (winner)" if policy == winner else policy,
            str(result.requests),
            str(result.failures),
            milliseconds(result.ttft_ms.p50),
            milliseconds(result.ttft_ms.p95),
            milliseconds(result.session_wall_ms.p50),
            tokens(result.claimed_tokens),
            tokens(result.actual_cached_tokens),
            tokens(claimed_minus_actual(result), signed=True),
            percent(hit_ratio(result)),
            tokens(result.recomputed_tokens),
            times(result.max_over_mean_load),
        )
        for policy, result in results.items()
    ]
    origins = (*[Origin.MEASURED] * 2, *[time] * 3, *[Origin.MEASURED] * 2, *[Origin.DERIVED] * 4)
    return Table(header, tuple(rows), emphasis=tuple(policy == winner for policy in results), origins=origins)


def failures_table(measured: Measured) -> Table:
    """Every way in which a planned request was not answered, by policy; all stay in the percentiles that are judged."""
    counts = {policy: _failures(measured.arms_of(policy)) for policy in measured.results}
    kinds = sorted({kind for own in counts.values() for kind in own})
    header = ("policy", "planned", "answered", "without content", "retries", "no record", *kinds)
    rows = [
        (
            policy,
            str(result.requests),
            str(result.requests - result.failures),
            str(result.answers_without_content),
            str(result.retries),
            str(result.unrecorded_requests),
            *(str(counts[policy][kind]) for kind in kinds),
        )
        for policy, result in measured.results.items()
    ]
    return Table(header, tuple(rows), origins=(Origin.MEASURED,) * (len(header) - 1))


def first_wave_table(measured: Measured) -> Table:
    """What the first requests on a worker that just started waited, against those after them."""
    time = _time(measured)
    rows = []
    for policy in measured.results:
        first: list[float] = []
        later: list[float] = []
        for data in measured.arms_of(policy):
            seen = Counter[str]()
            for sample in sorted(data.samples, key=lambda sample: sample.sent_ms):
                if sample.ttft_ms is None or sample.worker is None:
                    continue
                (first if seen[sample.worker] < FIRST_REQUESTS else later).append(sample.ttft_ms)
                seen[sample.worker] += 1
        early, late = distribution(first), distribution(later)
        rows.append(
            (policy, str(early.count), *map(milliseconds, (early.p50, early.p95)), str(late.count),
             *map(milliseconds, (late.p50, late.p95)))
        )  # fmt: skip
    header = (
        "policy", f"first {FIRST_REQUESTS} per worker and arm", "their TTFT p50 ms", "p95 ms", "all later ones",
        "their TTFT p50 ms", "p95 ms",
    )  # fmt: skip
    return Table(header, tuple(rows), origins=(Origin.MEASURED, time, time, Origin.MEASURED, time, time))


def _failures(arms: Sequence[ArmData]) -> Counter[str]:
    return Counter(
        (sample.failure or "").partition(":")[0] for data in arms for sample in data.samples if not sample.ok
    )


def _time(measured: Measured) -> Origin:
    mock = measured.manifest.stated.fleet.layer == Layer.MOCK.value
    return Origin.MODELLED if mock else Origin.MEASURED


def _arms_table(measured: Measured) -> Table:
    header = (
        "arm, in order", "reset", "started empty", "samples", "receipts", "index at start", "hits in engines' counters",
        "wall s", "router pid", "worker pids", "left behind",
    )  # fmt: skip
    rows = [
        (
            facts.arm,
            facts.isolation.reset.value.replace("_", " "),
            facts.isolation.state.value,
            str(facts.samples),
            str(facts.receipts),
            str(facts.index_blocks_at_start),
            percent(facts.isolation.engine_hit_ratio),
            f"{facts.wall_s:.1f}",
            str(facts.processes[0].pid),
            " ".join("unknown" if process.pid is None else str(process.pid) for process in facts.processes[1:]),
            ", ".join(facts.leftovers) or "nothing",
        )
        for facts in measured.manifest.observed
    ]
    return Table(header, tuple(rows), emphasis=tuple(row[2] != "clean" for row in rows))


def _counters_table(measured: Measured) -> Table:
    header = ("arm and worker", "queried tokens", "hit tokens", "preemptions", "peak of KV in use")
    rows = [
        (
            f"{facts.arm}: {worker}",
            tokens(counted.queries_tokens),
            tokens(counted.hits_tokens),
            tokens(counted.preemptions),
            percent(counted.kv_usage_peak_ratio),
        )
        for facts in measured.manifest.observed
        for worker, counted in facts.counters.items()
    ]
    return Table(header, tuple(rows), origins=(Origin.MEASURED,) * 4)


def _facts(measured: Measured) -> tuple[tuple[str, str], ...]:
    stated = measured.manifest.stated
    fleet, settings = stated.fleet, stated.settings
    found = [
        ("trace", f"{stated.trace.name} ({stated.trace.format}), sha256 {stated.trace.sha256}"),
        ("plan", f"{stated.plan.sessions} sessions, {stated.plan.requests} requests, sha256 {stated.plan.sha256}"),
        ("seed", str(stated.plan.seed)),
        ("fleet", f"layer {fleet.layer}, {fleet.workers} workers on {fleet.hardware}: {', '.join(fleet.engines)}"),
        ("model", f"{fleet.model.name}, {fleet.model.revision or 'revision unknown'}"),
        ("order", f"{settings.order.value}: {', '.join(stated.order)}"),
        ("reset between arms", settings.reset.value.replace("_", " ")),
    ]
    if fleet.layer == Layer.MOCK.value:
        mock = settings.fleet
        rates = f"prefill {mock.prefill_tokens_per_s:,.0f} tokens/s, decode {mock.decode_ms:g} ms a step"
        found.append(("each worker", f"{mock.blocks} blocks of {mock.block_size_tokens} tokens, {rates}"))
    host = stated.host
    return (
        *found,
        ("kvrelay", f"{stated.kvrelay}, commit {stated.commit or 'unknown'}"),
        ("host", f"{host.system} {host.machine}, {host.cores} cores, Python {host.python}"),
        ("manifest digest", measured.manifest.digest),
    )
