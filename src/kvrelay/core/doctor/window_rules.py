"""Is the cache worth what it should be? Rules over a stretch of traffic, shared by `doctor`, the alerts and the page.

The thresholds are those of the alert rules, which ask Prometheus the same questions (`edge/observe/alerts.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.core.doctor.facts import Facts
from kvrelay.core.doctor.finding import FleetRule, Judged, fail, not_applicable, ok, unknown, warn
from kvrelay.core.doctor.window import PromptClass, Timed, Window, WorkerWindow

MIN_SAMPLES = 20  # below it a median says nothing
MIN_ELIGIBLE_TOKENS = 10_000
HIT_HIGH, HIT_LOW = 0.5, 0.2  # of what could be hit
NOT_LOWER, LOWER = 0.9, 0.7  # median of warm prompts to that of cold ones
STALE_RATIO = 0.1  # of what was claimed
HOT_RATIO, HOT_REQUESTS = 3.0, 8.0  # to the mean of the others; and at all
ORPHANS_GROWN_BLOCKS = 64
YOUNG_S = 600.0
FAILED_RATIO = 0.05


def _of_window(judge: Callable[[Window], Judged]) -> Callable[[Facts], Judged]:
    def judged(facts: Facts) -> Judged:
        if facts.window is None:
            return not_applicable("no gateway was watched")
        if not facts.window.requests:
            return not_applicable("no request ended meanwhile")
        return judge(facts.window)

    return judged


def _comparable(window: Window) -> list[PromptClass]:
    enough = (one for one in window.prompt_classes if min(one.warm.count, one.cold.count) >= MIN_SAMPLES)
    return [one for one in enough if one.warm.p50_s is not None and one.cold.p50_s]


def _ratio(one: PromptClass) -> float:
    assert one.warm.p50_s is not None and one.cold.p50_s, "comparable"
    return one.warm.p50_s / one.cold.p50_s


def _told(one: PromptClass) -> str:
    return f"prompts of {one.name} tokens: {_ms(one.warm)} with a hit, {_ms(one.cold)} without"


def _ms(timed: Timed) -> str:
    return f"{(timed.p50_s or 0) * 1e3:.0f} ms (p50 of {timed.count})"


def _hit_known(window: Window) -> Judged | float:
    if (window.eligible_tokens or 0) < MIN_ELIGIBLE_TOKENS:
        return unknown(f"insufficient_samples: {window.eligible_tokens or 0:.0f} tokens could be hit so far")
    ratio = window.hit_ratio
    return unknown("hits are not reported") if ratio is None else ratio


def _failing(window: Window) -> Judged:
    if window.requests < MIN_SAMPLES:
        return unknown(f"insufficient_samples: {window.requests} requests so far")
    said = f"{window.failed} of {window.requests} requests failed"
    return fail(said) if window.failed > FAILED_RATIO * window.requests else ok(said)


def _remote_slow(window: Window) -> Judged:
    hit = _hit_known(window)
    if isinstance(hit, Judged):
        return hit
    said = f"{hit:.0%} of what could be hit was"
    if hit < HIT_HIGH:
        return ok(f"{said}: not the question here")
    classes = _comparable(window)
    if not classes:
        return unknown(f"insufficient_samples: {said}, and no length of prompt has {MIN_SAMPLES} hits and misses")
    worst = max(classes, key=_ratio)
    if _ratio(worst) < NOT_LOWER:
        return ok(f"{said}; {_told(worst)}")
    where = {
        None: "what was loaded from shared tiers is not known",
        True: f"{window.remote_bytes or 0:.0f} bytes came from shared tiers: look at their latency",
        False: "nothing came from shared tiers: look at the queues of the workers",
    }[None if window.remote_bytes is None else window.remote_bytes > 0]
    return warn(f"{said}, yet {_told(worst)}; {where}")


def _capacity(window: Window) -> Judged:
    hit = _hit_known(window)
    if isinstance(hit, Judged):
        return hit
    said = f"{hit:.0%} of what could be hit was"
    if hit >= HIT_LOW:
        return ok(said)
    classes = _comparable(window)
    if not classes:
        return unknown(f"insufficient_samples: {said}, and no length of prompt has {MIN_SAMPLES} hits and misses")
    best = min(classes, key=_ratio)
    if _ratio(best) > LOWER:
        return ok(f"{said}, and a hit gains little: {_told(best)}")
    lost = ", ".join(f"{gate} {tokens:.0f}" for gate, tokens in window.lost_tokens.items() if tokens)
    return warn(f"only {said}, while {_told(best)}; tokens lost by gate: {lost or 'not known'}")


def _index_stale(window: Window) -> Judged:
    claimed = {worker.name: worker for worker in window.workers if worker.claimed_tokens >= MIN_ELIGIBLE_TOKENS}
    if not claimed:
        return unknown(f"insufficient_samples: no worker was claimed to hold {MIN_ELIGIBLE_TOKENS} tokens so far")
    ratios = {name: worker.stale_claim_tokens / worker.claimed_tokens for name, worker in claimed.items()}
    stale = [f"{name} {ratio:.0%}" for name, ratio in ratios.items() if ratio > STALE_RATIO]
    if stale:
        return warn(f"claimed and then not hit: {', '.join(stale)} of the claimed tokens")
    return ok(f"at most {max(ratios.values()):.1%} of the claimed tokens were not hit")


def _hot_worker(window: Window) -> Judged:
    active = {one.name: one.active_requests for one in window.workers if one.active_requests is not None}
    if len(active) < 2:
        return not_applicable("there are not two workers to compare")
    hottest = max(active, key=lambda name: active[name])
    others = [requests for name, requests in active.items() if name != hottest]
    mean = sum(others) / len(others)
    said = f"{hottest} has {active[hottest]:.0f} requests, the others {mean:.1f} on average"
    return warn(said) if active[hottest] >= max(HOT_REQUESTS, HOT_RATIO * mean) else ok(said)


def _breaker(window: Window) -> Judged:
    if window.open_breakers is None:
        return not_applicable("there is no store")
    return (
        fail(f"out of use: {', '.join(window.open_breakers)}") if window.open_breakers else ok("all tiers are in use")
    )


def _orphans(window: Window) -> Judged:
    grown = {one.name: change for one in window.workers if (change := _orphans_grown(one)) is not None}
    if not grown:
        return not_applicable("seen only once")
    growing = [f"{name} by {change:.0f}" for name, change in grown.items() if change > ORPHANS_GROWN_BLOCKS]
    return warn(f"blocks without a parent grew: {', '.join(growing)}") if growing else ok("none grew")


def _orphans_grown(worker: WorkerWindow) -> float | None:
    if worker.orphan_blocks is None or worker.orphan_blocks_before is None:
        return None
    return worker.orphan_blocks - worker.orphan_blocks_before


def _cold_start(window: Window) -> Judged:
    ages = {one.name: one.age_s for one in window.workers if one.age_s is not None}
    if not ages:
        return unknown("when the workers began is not known")
    young = [f"{name} {age_s:.0f} s" for name, age_s in ages.items() if age_s < YOUNG_S]
    hit = window.hit_ratio
    if young and hit is not None and hit < HIT_HIGH:
        return warn(f"known for only {', '.join(young)}: caches are empty, and {hit:.0%} of what could be hit was")
    return ok("no worker is young, or hits do not suffer from it")


WINDOW_RULES = (
    FleetRule(
        code="requests_failing",
        setting="gateway",
        asks="Are requests answered?",
        cause="Workers are lost or too slow for the timeouts, or nobody is left to take a request.",
        fix="Receipts say why (`kvrelay receipts tail`); look at attempts by fault and at /admin/workers.",
        judge=_of_window(_failing),
    ),
    FleetRule(
        code="remote_slow",
        setting="store",
        asks="Are prompts that hit answered sooner than those that do not?",
        cause="Much is hit and nobody waits less: loading from another tier, or the queue, takes what the hit saves.",
        fix="Compare fetch latency with prefill time; lower `store.deadline_ms`, or take the tier out.",
        judge=_of_window(_remote_slow),
    ),
    FleetRule(
        code="capacity_or_chunk",
        setting="store",
        asks="Is as much hit as the traffic repeats?",
        cause="A hit pays, but few are made: caches are too small for the traffic, or units of reuse are too large.",
        fix="`residency` lost most: more memory or tiers. `prefix` lost most: smaller chunks, or nothing is shared.",
        judge=_of_window(_capacity),
    ),
    FleetRule(
        code="index_stale",
        setting="events",
        asks="Do workers still hold what they are claimed to hold?",
        cause="Evictions do not reach the index in time: events are lost, late or misread, or claims are guesses.",
        fix="`kvrelay doctor` examines the events; POST /admin/workers/NAME/resync rebuilds what can be replayed.",
        judge=_of_window(_index_stale),
    ),
    FleetRule(
        code="hot_worker",
        setting="policy",
        asks="Is the load spread over the workers?",
        cause="One prefix or session draws everything to one worker, or the others are not routable.",
        fix="Look at route reasons and /admin/workers; raise `policy.cache_load.beta`, or use the scorer `predict`.",
        judge=_of_window(_hot_worker),
    ),
    FleetRule(
        code="breaker_open",
        setting="store.tiers",
        asks="Are all tiers of the store in use?",
        cause="A tier failed or was too slow often enough to be taken out of use; requests compute instead.",
        fix="See that the tier's server answers; it is tried again by itself.",
        judge=_of_window(_breaker),
    ),
    FleetRule(
        code="orphan_growth",
        setting="events",
        asks="Does the number of blocks without a parent stay as it is?",
        cause="Events that announced their parents were lost, or the worker hashes in another way than we read it.",
        fix="POST /admin/workers/NAME/resync; if they grow again, `kvrelay doctor` compares block size and version.",
        judge=_of_window(_orphans),
    ),
    FleetRule(
        code="cold_cache",
        setting="workers",
        asks="Have the workers' caches had time to fill?",
        cause="A worker was started a short while ago, so its cache is empty; its first requests compute everything.",
        fix="Wait; or warm it up with the longest shared prompts before it takes traffic (drain, warm up, resume).",
        judge=_of_window(_cold_start),
    ),
)
