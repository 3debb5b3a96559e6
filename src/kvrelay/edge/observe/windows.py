"""The stretch between two readings in the words of the rules, and the four numbers that are read together."""

from __future__ import annotations

from msgspec import Struct

from kvrelay.core.doctor.window import PromptClass, Timed, Window, WorkerWindow
from kvrelay.core.model.units import Status
from kvrelay.edge.observe.metrics import CACHE_STATES, LONGEST_PROMPTS, PROMPT_CLASSES
from kvrelay.edge.observe.readings import Span

FAILED = tuple(status.value for status in (Status.REFUSED, Status.WORKER_LOST, Status.TIMEOUT, Status.ERROR))
IN_USE = "kvrelay_store_in_use"


class FourNumbers(Struct, frozen=True, kw_only=True):
    """Waiting, hits, throughput and memory belong together; None is unavailable."""

    ttft_p50_s: float | None
    ttft_p95_s: float | None
    ttft_count: int
    hit_ratio: float | None
    requests_per_s: float | None
    completion_tokens_per_s: float | None
    kv_usage_ratio: float | None  # of the fullest worker
    kv_fullest: str | None


def four_numbers(span: Span) -> FourNumbers:
    usage = span.after.by("kvrelay_reported_kv_usage_ratio", "worker")
    fullest = max(usage, key=lambda name: usage[name], default=None)
    eligible, hit = _eligible_and_hit(span)
    return FourNumbers(
        ttft_p50_s=span.quantile("kvrelay_ttft_seconds", 0.5),
        ttft_p95_s=span.quantile("kvrelay_ttft_seconds", 0.95),
        ttft_count=span.count("kvrelay_ttft_seconds"),
        hit_ratio=None if not eligible or hit is None else hit / eligible,
        requests_per_s=span.rate("kvrelay_requests_total"),
        completion_tokens_per_s=span.rate("kvrelay_completion_tokens_total"),
        kv_usage_ratio=None if fullest is None else usage[fullest],
        kv_fullest=fullest,
    )


def window(span: Span, *, now_s: float) -> Window:
    """`now_s`: wall time at the end, for the ages of workers."""
    eligible, hit = _eligible_and_hit(span)
    in_use = span.after.by(IN_USE, "tier")
    return Window(
        seconds=span.seconds,
        requests=round(span.increase("kvrelay_requests_total") or 0),
        failed=round(sum(span.increase("kvrelay_requests_total", status=status) or 0 for status in FAILED)),
        eligible_tokens=eligible,
        hit_tokens=hit,
        lost_tokens=span.increase_by("kvrelay_gate_loss_tokens_total", "gate"),
        prompt_classes=tuple(
            _prompt_class(span, name) for name in (*(name for _, name in PROMPT_CLASSES), LONGEST_PROMPTS)
        ),
        remote_bytes=span.increase("kvrelay_remote_bytes_read_total"),
        open_breakers=tuple(tier for tier, is_asked in in_use.items() if not is_asked) if in_use else None,
        workers=_workers(span, now_s),
    )


def _eligible_and_hit(span: Span) -> tuple[float | None, float | None]:
    """Of requests whose hits are known."""
    eligible = span.increase("kvrelay_eligible_tokens_total")
    hit = span.increase("kvrelay_actual_cached_tokens_total")
    if eligible is None:
        return None, hit
    return eligible - (span.increase("kvrelay_unaccounted_eligible_tokens_total") or 0.0), hit


def _prompt_class(span: Span, name: str) -> PromptClass:
    warm, cold = (
        Timed(
            span.quantile("kvrelay_ttft_by_cache_seconds", 0.5, cache=cache, prompt=name),
            span.count("kvrelay_ttft_by_cache_seconds", cache=cache, prompt=name),
        )
        for cache in CACHE_STATES
    )
    return PromptClass(name.replace("_", " "), warm, cold)


def _workers(span: Span, now_s: float) -> tuple[WorkerWindow, ...]:
    requests = span.increase_by("kvrelay_requests_total", "worker")
    claimed = span.increase_by("kvrelay_claimed_tokens_total", "worker")
    stale = span.increase_by("kvrelay_stale_claim_tokens_total", "worker")
    active = span.after.by("kvrelay_active_requests", "worker")
    waiting = span.after.by("kvrelay_reported_waiting_requests", "worker")
    orphans = span.after.by("kvrelay_orphan_blocks", "worker")
    before = {} if span.before is None else span.before.by("kvrelay_orphan_blocks", "worker")
    joined_s = span.after.by("kvrelay_worker_joined_timestamp_seconds", "worker")
    return tuple(
        WorkerWindow(
            name=name,
            requests=round(requests.get(name, 0)),
            active_requests=active.get(name),
            waiting_requests=waiting.get(name),
            claimed_tokens=claimed.get(name, 0.0),
            stale_claim_tokens=stale.get(name, 0.0),
            orphan_blocks=orphans.get(name),
            orphan_blocks_before=before.get(name),
            age_s=now_s - joined_s[name] if name in joined_s else None,
        )
        for name in span.after.by("kvrelay_worker_up", "worker")
    )
