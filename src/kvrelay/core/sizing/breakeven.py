"""When loading a prefix beats computing it: prefix length, bandwidth and latency against a prefill rate.

    computing   tokens / prefill rate
    fetching    latency + tokens x bytes per token / bandwidth

Both grow with the length, so there are two cases. If a token takes longer to fetch than to compute, fetching never
pays, however long the prefix. Otherwise it pays from a length on, at which the saved seconds make up for the latency.
"""

from __future__ import annotations

import math

from msgspec import Struct


class Link(Struct, frozen=True):
    """Where a prefix would be fetched from. Bandwidth in bytes per second, latency per fetch."""

    name: str
    bytes_per_s: float
    latency_s: float


class Prefill(Struct, frozen=True):
    """How fast a worker computes; `samples` of None: stated, not measured."""

    name: str
    tokens_per_s: float
    samples: int | None = None


class Point(Struct, frozen=True):
    """One prefix length on one link, against one prefill rate. `None`: no bandwidth, or no latency, is good enough."""

    tokens: int
    fetch_s: float
    compute_s: float
    breakeven_bytes_per_s: float | None  # the least bandwidth at this latency
    breakeven_latency_s: float | None  # the largest latency at this bandwidth

    @property
    def fetch(self) -> bool:
        """A tie is fetched: it leaves the engine free."""
        return self.fetch_s <= self.compute_s


def point(tokens: int, link: Link, prefill: Prefill, *, bytes_per_token: float) -> Point:
    payload = tokens * bytes_per_token
    compute_s = tokens / prefill.tokens_per_s
    transfer_s = payload / link.bytes_per_s
    spare_s = compute_s - link.latency_s
    largest_latency_s = compute_s - transfer_s
    return Point(
        tokens,
        fetch_s=link.latency_s + transfer_s,
        compute_s=compute_s,
        breakeven_bytes_per_s=payload / spare_s if spare_s > 0 else None,
        breakeven_latency_s=largest_latency_s if largest_latency_s >= 0 else None,
    )


def breakeven_tokens(link: Link, prefill: Prefill, *, bytes_per_token: float) -> int | None:
    """The shortest prefix that is worth fetching; None: none is, at this bandwidth."""
    gained_s = 1 / prefill.tokens_per_s - bytes_per_token / link.bytes_per_s
    if gained_s <= 0:
        return None
    tokens = math.ceil(link.latency_s / gained_s)
    return max(1, tokens)
