"""The runbook, made of the rules and alerts: what to aim at, where things stood, how to go back, when it is over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvrelay.core.doctor.window_rules import FAILED_RATIO
from kvrelay.edge.observe.alerts import ALERTS, BY_CODE, Alert
from kvrelay.edge.observe.windows import FourNumbers

SEVERITIES = {
    "page": "somebody has to look now",
    "ticket": "somebody has to look today",
    "info": "good to know when something else is wrong",
}


def runbook(
    *, baseline: FourNumbers | None = None, drills: Sequence[tuple[str, str]] = (), targets: Sequence[str] = ()
) -> str:
    """Markdown. `drills`: name and what it must show, of each. `targets`: what the fleet has to keep, one line each."""
    parts = (_head(), _target(targets), _baseline(baseline), _rollback(), _alerts(), _drills(drills))
    return "\n".join(line for part in parts for line in part)


def _head() -> Iterator[str]:
    yield "# Runbook"
    yield ""
    yield "Made by `kvrelay dashboard runbook`. Fill in what only you can know: who is called, what your users accept."
    yield ""


def _target(targets: Sequence[str]) -> Iterator[str]:
    yield "## Target"
    yield ""
    yield from (f"- {target}" for target in targets)
    if not targets:
        yield f"- At most {FAILED_RATIO:.0%} of the requests fail (alert `KvrelayRequestsFailing`)."
        yield "- Waiting time: not stated. Lock gates (`kvrelay gates lock`) and name their file with `--gates`."
    yield ""


def _baseline(numbers: FourNumbers | None) -> Iterator[str]:
    yield "## Baseline"
    yield ""
    if numbers is None:
        yield "Not taken. Name a running gateway with `--router` at an hour that you call normal."
    else:
        yield from (f"- {line}" for line in told(numbers))
    yield ""


def told(numbers: FourNumbers) -> tuple[str, str, str, str]:
    """Waiting, hits, throughput, memory: read together or not at all."""
    count = f"{numbers.ttft_count} requests"
    kv = "unavailable"
    if numbers.kv_usage_ratio is not None:
        kv = f"{numbers.kv_usage_ratio:.0%} of the KV blocks of {numbers.kv_fullest}, the fullest worker"
    tokens = _per_s(numbers.completion_tokens_per_s, "tokens")
    hit = "unavailable" if numbers.hit_ratio is None else f"{numbers.hit_ratio:.1%} of what could be hit"
    return (
        f"TTFT: p50 {_ms(numbers.ttft_p50_s)}, p95 {_ms(numbers.ttft_p95_s)} ({count})",
        f"hit rate: {hit}",
        f"throughput: {_per_s(numbers.requests_per_s, 'requests')}, {tokens}",
        f"memory: {kv}",
    )


def _ms(seconds: float | None) -> str:
    return "unavailable" if seconds is None else f"{seconds * 1e3:.0f} ms"


def _per_s(value: float | None, what: str) -> str:
    return f"{what} unavailable" if value is None else f"{value:.1f} {what}/s"


def _rollback() -> Iterator[str]:
    yield "## Rollback"
    yield ""
    yield "Each step takes effect at once, drops no request, and can be taken back."
    yield ""
    yield '1. Route without the cache: `curl -X PUT localhost:8001/admin/policy -d \'{"policy": "least_load"}\'`.'
    yield "   `round_robin` is the control that needs no index and no load figures."
    yield "2. Take a worker out: `curl -X POST localhost:8001/admin/workers/NAME/drain`; back with `resume`."
    yield "3. Take the store out: remove `[[store.tiers]]` and start the workers anew; they compute instead of loading."
    yield "4. Go back to the last good configuration: put the file back and send SIGHUP; a bad file changes nothing."
    yield ""
    yield "It is back to normal when the four numbers are at the baseline again and no alert fires."
    yield ""


def _alerts() -> Iterator[str]:
    yield "## When an alert fires"
    yield ""
    for alert in ALERTS:
        yield from _alert(alert)


def _alert(alert: Alert) -> Iterator[str]:
    rule = BY_CODE[alert.code]
    yield f"### {alert.code}"
    yield ""
    yield f"`{alert.name}`, {alert.severity}: {SEVERITIES[alert.severity]}. {rule.asks}"
    yield ""
    yield f"- **Cause:** {rule.cause}"
    yield f"- **Do:** {rule.fix}"
    yield f"- **Decided at:** `{rule.setting}`"
    yield f"- **Over when:** the expression has had no result for {_lasting(alert)}."
    yield ""
    yield "```promql"
    yield alert.expression
    yield "```"
    yield ""


def _lasting(alert: Alert) -> str:
    return "one evaluation" if alert.lasting == "0m" else alert.lasting


def _drills(drills: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield "## Drills"
    yield ""
    rows = [
        f"| `{name}` | {shows} | verdict `pass`, and the four numbers back at the baseline |" for name, shows in drills
    ]
    if rows:
        yield "| drill | must show | accepted when |"
        yield "|---|---|---|"
        yield from rows
    else:
        yield "This version lists no drills."
    yield ""
