"""Simple routers over known matches, for capacity questions and as reference; the product's own are in `policy/`.

They see what every worker really holds at that moment, with no delay: what a router with perfect knowledge would do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvrelay.core.cachesim.prefix_trace import PrefixRequest

PREFILL_TOKENS_PER_S = 10_000.0


class Router(Protocol):
    """`matches` has the matched blocks on every worker; `missing_tokens` what each would have to compute."""

    def choose(self, request: PrefixRequest, matches: Sequence[int], missing_tokens: Sequence[int]) -> int: ...


class RoundRobin:
    """Request i goes to worker i mod n."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._turn = 0

    def choose(self, request: PrefixRequest, matches: Sequence[int], missing_tokens: Sequence[int]) -> int:
        chosen = self._turn % self._workers
        self._turn += 1
        return chosen


class Sticky:
    """A session stays where its first request went: to the next worker in turn."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._homes: dict[str, int] = {}

    def choose(self, request: PrefixRequest, matches: Sequence[int], missing_tokens: Sequence[int]) -> int:
        return self._homes.setdefault(request.session, len(self._homes) % self._workers)


class BestPrefix:
    """Most matched blocks, then fewest requests so far, then the lowest number. `least_ratio`: below this share of the
    request's blocks a match does not count, and the fewest requests decide."""

    def __init__(self, workers: int, *, least_ratio: float = 0.0) -> None:
        self._requests = [0] * workers
        self._least_ratio = least_ratio

    def choose(self, request: PrefixRequest, matches: Sequence[int], missing_tokens: Sequence[int]) -> int:
        counts = self._requests
        chosen = min(range(len(counts)), key=lambda w: (-matches[w], counts[w], w))
        if matches[chosen] < self._least_ratio * len(request.blocks):
            chosen = min(range(len(counts)), key=lambda w: (counts[w], w))
        counts[chosen] += 1
        return chosen


class MinMissingPlusBacklog:
    """Least missing tokens plus backlog, where a worker works its backlog off at a constant rate."""

    def __init__(self, workers: int, *, prefill_tokens_per_s: float = PREFILL_TOKENS_PER_S) -> None:
        self._rate = prefill_tokens_per_s
        self._requests = [0] * workers
        self._backlog_tokens = [0.0] * workers
        self._now_s = 0.0

    def choose(self, request: PrefixRequest, matches: Sequence[int], missing_tokens: Sequence[int]) -> int:
        done = max(0.0, request.at_s - self._now_s) * self._rate
        self._now_s = max(self._now_s, request.at_s)
        backlog = self._backlog_tokens = [max(0.0, tokens - done) for tokens in self._backlog_tokens]
        chosen = min(range(len(backlog)), key=lambda w: (missing_tokens[w] + backlog[w], self._requests[w], w))
        self._requests[chosen] += 1
        backlog[chosen] += missing_tokens[chosen]
        return chosen


ROUTERS: dict[str, Callable[[int], Router]] = {
    "round_robin": RoundRobin,
    "sticky": Sticky,
    "best_prefix": BestPrefix,
    "best_prefix_if_half_else_fewest_requests": lambda workers: BestPrefix(workers, least_ratio=0.5),
    "min_missing_plus_backlog": MinMissingPlusBacklog,
}
