"""Questions after the launch: is it faster *and* does it hit *and* is memory safe; and what does a restart cost?"""

from __future__ import annotations

from kvrelay.core.checklist.deployment import near_network
from kvrelay.core.checklist.dossier import ArmEvidence, Dossier, RunEvidence
from kvrelay.core.checklist.item import Answer, Item, all_of, failed, passed, unknown
from kvrelay.core.doctor.finding import Verdict
from kvrelay.core.doctor.window import PromptClass, Window
from kvrelay.core.doctor.window_rules import HIT_HIGH, HIT_LOW, LOWER, MIN_ELIGIBLE_TOKENS, MIN_SAMPLES
from kvrelay.core.gates.judge import Outcome
from kvrelay.core.stats.paired import Call

STAGE = "postlaunch"
SAFE_KV_USAGE = 0.95  # of the engine's own pool
GATEWAY = "the gateway's metrics"


def three_way(dossier: Dossier) -> Answer:
    """All three have to hold; two of them and an unknown third are unknown."""
    return all_of((_faster(dossier), _hits(dossier), _memory_safe(dossier)))


def _faster(dossier: Dossier) -> Answer:
    told = _tiered(dossier)
    if told is not None:
        run, arm = told
        assert arm.ttft_ratio is not None
        ratio, call = arm.ttft_ratio.ratio, arm.ttft_ratio.call
        said = f"TTFT {_times(ratio)} that of {run.baseline} ({arm.ttft_ratio.pairs} pairs)"
        if call is Call.LOWER:
            return passed(said, run.source)
        if call is Call.TOO_FEW:
            return unknown(f"{said}: too few", run.source)
        return failed(f"{said}: not surely lower", run.source)
    comparable = _comparable(_window(dossier))
    if not comparable:
        return unknown(f"TTFT: no run compares it, and no length of prompt has {MIN_SAMPLES} hits and misses")
    worst = max(comparable, key=_gain)
    said = f"TTFT with a hit {_gain(worst):.2f} times that without (prompts of {worst.name} tokens)"
    return passed(said, GATEWAY) if _gain(worst) <= LOWER else failed(f"{said}: not lower", GATEWAY)


def _hits(dossier: Dossier) -> Answer:
    told = _tiered(dossier)
    window = _window(dossier)
    if told is not None:
        ratio, source = told[1].hit_ratio, told[0].source
    elif window is not None and (window.eligible_tokens or 0) >= MIN_ELIGIBLE_TOKENS:
        ratio, source = window.hit_ratio, GATEWAY
    else:
        return unknown("hits: no run and too little traffic")
    if ratio is None:
        return unknown("hits are not reported", source)
    said = f"{ratio:.0%} of what could be hit was"
    return passed(said, source) if ratio >= HIT_LOW else failed(f"{said}, less than {HIT_LOW:.0%}", source)


def _memory_safe(dossier: Dossier) -> Answer:
    found = [finding for finding in dossier.finding("memory") if finding.verdict in (Verdict.OK, Verdict.FAIL)]
    if found:
        return (passed if found[0].verdict is Verdict.OK else failed)(f"memory: {found[0].detail}", "kvrelay doctor")
    told = _tiered(dossier)
    peak = None if told is None else told[1].kv_usage_peak_ratio
    if told is not None and peak is not None:
        said = f"memory: the engines' pools were at most {peak:.0%} full"
        return passed(said, told[0].source) if peak <= SAFE_KV_USAGE else failed(said, told[0].source)
    return unknown("memory: nobody says how full it is")


def cold_start(dossier: Dossier) -> Answer:
    """The first wave after a restart, against a limit stated beforehand."""
    seen: list[tuple[float, str, str]] = []
    for each in dossier.blocks:
        for block in each.blocks:
            if block.before == "restart" and block.p95_ms is not None:
                seen.append((block.p95_ms, f"{block.policy}, {block.name}", each.source))
    for run in dossier.runs:
        for wave in run.waves:
            if wave.p95_ms is not None:
                seen.append((wave.p95_ms, f"first {wave.requests} answers of {wave.worker}", run.source))
    if not seen:
        return unknown("no restart was measured")
    slowest_ms, where, source = max(seen)
    said = f"p95 of the first wave {slowest_ms:,.0f} ms ({where})"
    stated = dossier.limits.cold_ttft_ms
    limits = [run.ttft_p95_limit_ms for run in dossier.runs if run.ttft_p95_limit_ms is not None]
    limit_ms = stated if stated is not None else next(iter(limits), None)
    if limit_ms is None:
        return unknown(f"{said}; what would be acceptable is not stated", source)
    if slowest_ms > limit_ms:
        return failed(f"{said}, more than {limit_ms:,.0f} ms", source)
    return passed(f"{said}, at most {limit_ms:,.0f} ms", source)


def hits_without_gain(dossier: Dossier) -> Answer:
    """Much is hit and nobody waits less: then the tiers are measured, here and now."""
    symptom = _symptom(dossier)
    if symptom.verdict is not Outcome.FAIL:
        return symptom
    if not dossier.shared_tiers:
        return failed(
            f"{symptom.reason}; nothing is fetched from elsewhere: look at the workers' queues", *symptom.evidence
        )
    measured = near_network(dossier)
    if measured.verdict is Outcome.PASS:
        blame = "the tier is quick enough: look at the workers' queues"
    elif measured.verdict is Outcome.FAIL:
        blame = "the tier is too slow"
    else:
        blame = "the tier has to be measured"
    return failed(f"{symptom.reason}; {blame}: {measured.reason}", *symptom.evidence, *measured.evidence)


def _symptom(dossier: Dossier) -> Answer:
    told = _tiered(dossier)
    if told is not None and told[1].hit_ratio is not None:
        run, arm = told
        assert arm.ttft_ratio is not None
        hit, call = arm.hit_ratio or 0.0, arm.ttft_ratio.call
        said = f"{hit:.0%} of what could be hit was, TTFT {_times(arm.ttft_ratio.ratio)} that of {run.baseline}"
        if hit < HIT_HIGH or call is Call.LOWER:
            return passed(said, run.source)
        return unknown(f"{said}: too few pairs", run.source) if call is Call.TOO_FEW else failed(said, run.source)
    found = dossier.finding("remote_slow")
    if found and found[0].verdict is Verdict.WARN:
        return failed(found[0].detail, GATEWAY)
    if found and found[0].verdict is Verdict.OK:
        return passed(found[0].detail, GATEWAY)
    return unknown(found[0].detail if found else "no run with a tier and no gateway to look at")


def _tiered(dossier: Dossier) -> tuple[RunEvidence, ArmEvidence] | None:
    """The last run that compares an arm with tiers to a baseline without them; of that run, the arm with the most."""
    for run in reversed(dossier.runs):
        base = run.arm(run.baseline)
        arms = [arm for arm in run.arms if arm.added and arm.ttft_ratio is not None]
        if arms and base is not None and not base.added:
            return run, max(arms, key=lambda arm: len(arm.added))
    return None


def _window(dossier: Dossier) -> Window | None:
    return None if dossier.facts is None else dossier.facts.window


def _comparable(window: Window | None) -> list[PromptClass]:
    classes = () if window is None else window.prompt_classes
    enough = (one for one in classes if min(one.warm.count, one.cold.count) >= MIN_SAMPLES)
    return [one for one in enough if one.warm.p50_s is not None and one.cold.p50_s]


def _times(ratio: float | None) -> str:
    return "an unknown multiple of" if ratio is None else f"{ratio:.2f} times"


def _gain(one: PromptClass) -> float:
    assert one.warm.p50_s is not None and one.cold.p50_s, "comparable"
    return one.warm.p50_s / one.cold.p50_s


POSTLAUNCH = (
    Item(
        code="three_way",
        stage=STAGE,
        asks="Is TTFT lower, and are hits noticeable, and is memory safe: all three?",
        todo="One of the three alone proves nothing; see which part fails.",
        judge=three_way,
    ),
    Item(
        code="cold_start",
        stage=STAGE,
        asks="After a restart, is the first wave's TTFT acceptable?",
        todo="kvrelay replay preset:cold_warm_restart, and state --cold-ttft-ms; warm new workers from a shared tier.",
        judge=cold_start,
    ),
    Item(
        code="hits_without_gain",
        stage=STAGE,
        asks="Much is hit: does TTFT fall with it? If not, how slow is the remote tier?",
        todo="Take the tier out if fetching is slower than computing, else look at the queues of the workers.",
        judge=hits_without_gain,
    ),
)
