"""Wording of `kvrelay trace`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvrelay.cli.messages import TRACE_FLAGS
from kvrelay.core.stats.distribution import Distribution
from kvrelay.core.traces.cut import CutCounts
from kvrelay.core.traces.facts import EndlessCache, TraceFacts
from kvrelay.core.traces.reuse import Reuse

REASONS = {
    "over_long": "too long for the model",
    "after_over_long": "after a turn that was left out",
    "beyond_turn_limit": "beyond `--max-turns`",
    "session_too_short": "in sessions shorter than `--min-turns`",
    "session_not_sampled": "in sessions that were not drawn",
    "beyond_request_limit": "beyond `--max-requests`",
}
NEEDS_TOKENS = "error: `--tokenizer` needs the extra `tokens`\nhint: pip install 'kvrelay[tokens]'"


def unreadable(path: object, reason: str) -> str:
    return f"error: cannot read trace `{path}`: {reason}\nhint: a file, or a preset as in `preset:agents`"


def not_told(path: object, line: int, found: str, legal: str, option: str) -> str:
    """The file can be read in more than one way."""
    return (
        f"error: `{path}`, line {line}: {found}\n"
        f"  needed: {legal}; it is not guessed, because reuse depends on it\n"
        f"hint: for instance `{TRACE_FLAGS[option]}`"
    )


def cannot_express(kind: str, reason: str) -> str:
    return (
        f"error: this trace cannot be written as `{kind}`: {reason}\n"
        "hint: `--to kvrelay` loses nothing, `--to mooncake` holds any context"
    )


def cannot_write(path: object, reason: str) -> str:
    return f"error: cannot write `{path}` (from `--out`): {reason}"


def notices(lines: Sequence[str]) -> str:
    return "\n".join(f"note: {line}" for line in lines)


def written(path: Path, what: str) -> str:
    return f"{path}: {what}"


def requests_in(sessions: int, requests: int, kind: str) -> str:
    return f"{requests:,} requests of {sessions:,} sessions as `{kind}`"


def facts_in_words(name: str, kind: str, facts: TraceFacts) -> str:
    """What `trace inspect` prints for people."""
    lines = [f"{name} ({kind})"]
    agents = f", {facts.sub_agents:,} sub-agents" if facts.sub_agents else ""
    derived = "" if facts.derived_sessions is None else f" ({facts.derived_sessions:,} derived from shared blocks)"
    lines.append(f"  {facts.requests:,} requests, {facts.sessions:,} sessions{agents}{derived}")
    rate = "" if facts.requests_per_s is None else f", {facts.requests_per_s:.3g} requests/s"
    lines.append(f"  {facts.span_ms / 1000:,.1f} s from the first request to the last{rate}")
    size = "none" if facts.block_size_tokens is None else f"{facts.block_size_tokens} tokens, ids {facts.hash_scope}"
    tails = f", {facts.partial_tails:,} requests list a partial last block" if facts.partial_tails else ""
    lines.append(f"  blocks: {size}{tails}")
    lines.append("")
    lines.append(f"  {'':16}{'count':>9}{'p50':>11}{'p95':>11}{'p99':>11}{'mean':>13}{'largest':>11}")
    lengths = facts.lengths
    for label, found in (
        ("input tokens", lengths.input_tokens),
        ("output tokens", lengths.output_tokens),
        ("turns", lengths.turns),
        ("pause (ms)", lengths.think_ms),
    ):
        if found.count:
            lines.append(_distribution(label, found))
    for cache in facts.endless_cache:
        lines += ["", *_cache(cache)]
    if not facts.endless_cache:
        lines += ["", "  endless cache: unavailable, the trace has no block ids"]
    return "\n".join(lines) + "\n"


def _distribution(label: str, found: Distribution) -> str:
    cells = "".join(f"{value:>11,.0f}" for value in (found.p50 or 0, found.p95 or 0, found.p99 or 0))
    return f"  {label:16}{found.count:>9,}{cells}{found.mean or 0:>13,.1f}{found.max or 0:>11,.0f}"


def _cache(cache: EndlessCache) -> list[str]:
    lines = [f"  endless cache, tail rule `{cache.tail_rule}` ({cache.tail_rule_means})"]
    lines.append(f"    {_share(cache.token_hit)} = {cache.hit_tokens:,} hit tokens / {cache.tokens:,} input tokens")
    lines.append(f"    {_share(cache.block_hit)} = {cache.hit_blocks:,} hit blocks / {cache.blocks:,} blocks")
    shares = cache.block_shares
    if shares is not None:
        lines.append(
            f"    blocks sent before by the same session {shares.same_session:.1%}, a parent or sub-agent "
            f"{shares.family:.1%}, other sessions {shares.other_sessions:.1%}; never {shares.never_seen:.1%}"
        )
    return lines


def filtered(counts: CutCounts, label: str, before: Reuse, after: Reuse) -> str:
    """Retained and excluded add up to received; the ceilings say what the cut did to reuse."""
    lines = [f"{counts.retained:,} of {counts.received:,} requests retained, {counts.excluded:,} excluded"]
    lines += [f"  {getattr(counts, name):,} {reason}" for name, reason in REASONS.items() if getattr(counts, name)]
    lines.append(
        f"  endless cache: {_share(before.token_hit)} of input tokens before, {_share(after.token_hit)} after "
        f"(tail rule `{after.tail_rule}`)"
    )
    if label:
        lines.append(f"  results on it are to be called: {label}")
    return "\n".join(lines)


def _share(share: float | None) -> str:
    return "unavailable" if share is None else f"{share:.2%}"
