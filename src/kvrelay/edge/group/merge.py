"""Many answers of the admin API into one. Pure: JSON values in, a JSON value out.

What each process counts for itself (requests, booked load) adds up. What all of them look at (a worker's cache, its
gauges, session bindings) is one thing seen several times, of which the largest view is shown: the others are behind.
What must hold everywhere to be true at all (a worker is routable) holds if it holds in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Json = Any
Rule = Callable[[Sequence[Json]], Json]

_WORST_FIRST = ("unusable", "incomplete", "approximate", "live")
_STANDING_WORST_FIRST = ("dead", "unreached", "suspended", "routable")


def first(values: Sequence[Json]) -> Json:
    """Of things that are the same everywhere."""
    return next((value for value in values if value is not None), None)


def total(values: Sequence[Json]) -> Json:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def largest(values: Sequence[Json]) -> Json:
    return max((value for value in values if value is not None), default=None)


def smallest(values: Sequence[Json]) -> Json:
    return min((value for value in values if value is not None), default=None)


def mean(values: Sequence[Json]) -> Json:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def everywhere(values: Sequence[Json]) -> Json:
    return all(values)


def anywhere(values: Sequence[Json]) -> Json:
    return any(values)


def worst_of(order: Sequence[str]) -> Rule:
    def rule(values: Sequence[Json]) -> Json:
        known = [value for value in values if value in order]
        return min(known, key=order.index) if known else first(values)

    return rule


def by_key(rule: Rule) -> Rule:
    """Of maps: each key by the rule."""

    def merged_maps(values: Sequence[Json]) -> Json:
        names = dict.fromkeys(name for value in values if value for name in value)
        return {name: rule([value[name] for value in values if value and name in value]) for name in names}

    return merged_maps


def entries(key: tuple[str, ...], rules: Mapping[str, Rule]) -> Rule:
    """Of lists: entries that agree in all members of `key` are one entry."""

    def merged_lists(values: Sequence[Json]) -> Json:
        found: dict[tuple[Json, ...], list[Json]] = {}
        for entry in (entry for value in values for entry in value or ()):
            found.setdefault(tuple(entry.get(member) for member in key), []).append(entry)
        return [merged(same, rules) for same in found.values()]

    return merged_lists


def fields(rules: Mapping[str, Rule]) -> Rule:
    def merged_objects(values: Sequence[Json]) -> Json:
        known = [value for value in values if value is not None]
        return merged(known, rules) if known else None

    return merged_objects


def merged(parts: Sequence[Mapping[str, Json]], rules: Mapping[str, Rule]) -> dict[str, Json]:
    """One object of several; a member without a rule is taken to be the same everywhere."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: rules.get(name, first)([part[name] for part in parts if name in part]) for name in names}


DRIFT: Mapping[str, Rule] = dict.fromkeys(("compared", "over_claim", "under_claim", "resyncs"), total)
TARGET: Mapping[str, Rule] = {
    "index_state": worst_of(_WORST_FIRST),
    "index_blocks": by_key(largest),
    "orphan_blocks": largest,
    "active_requests": total,
    "queued_requests": total,
    "active_prefill_tokens": total,
    "active_decode_blocks": total,
    "foreign_requests": largest,
    "reported_running": largest,
    "reported_waiting": largest,
    "reported_kv_usage_ratio": largest,
    "prefill_tokens_per_s": mean,
    "prefill_rate_samples": total,
    "next_event_seq": smallest,
    "drift": fields(DRIFT),
}
ROUTER_WORKER: Mapping[str, Rule] = {
    "up": everywhere,
    "routable": everywhere,
    "standing": worst_of(_STANDING_WORST_FIRST),
    "draining": anywhere,
    "retired": anywhere,
    "targets": entries(("rank",), TARGET),
    "events": by_key(total),
}
ADMIN_WORKER: Mapping[str, Rule] = {
    "routable": everywhere,
    "standing": worst_of(_STANDING_WORST_FIRST),
    "draining": anywhere,
    "malformed_events": total,
    "router": fields(ROUTER_WORKER),
}
GATEWAY: Mapping[str, Rule] = {
    "draining": anywhere,
    "open_requests": total,
    "open_upstream_calls": total,
    "client_connections": total,
    "receipts_dropped": total,
    "uptime_s": largest,
}
STATUS: Mapping[str, Rule] = {
    "live_requests": total,
    "queue_depth": total,
    "sessions": largest,
    "in_flight_prompts": total,
    "index_blocks": largest,
    "spills": total,
    "late_events": total,
    "workers": entries(("name",), ROUTER_WORKER),
    "gateway": fields(GATEWAY),
}


def merged_status(parts: Sequence[Json]) -> Json:
    return merged(parts, STATUS)


def merged_workers(parts: Sequence[Json]) -> Json:
    return merged(parts, {"workers": entries(("name",), ADMIN_WORKER)})


def merged_worker(parts: Sequence[Json]) -> Json:
    return merged(parts, ADMIN_WORKER)


def merged_sessions(parts: Sequence[Json]) -> Json:
    return merged(parts, {"sessions": entries(("session_id", "tenant"), {})})


def merged_receipts(parts: Sequence[Json], limit: int) -> Json:
    """The last `limit` of all, newest first; times are of one clock, that of the machine."""
    receipts = [receipt for part in parts for receipt in part["receipts"]]
    return {"receipts": sorted(receipts, key=_ended_ms, reverse=True)[:limit]}


def newest_receipt(receipts: Iterable[Json]) -> Json:
    """Clients may use an id twice; None if nobody has it."""
    return max(receipts, key=_ended_ms, default=None)


def _ended_ms(receipt: Json) -> float:
    return float(receipt["arrived_ms"] + receipt["e2e_ms"])
