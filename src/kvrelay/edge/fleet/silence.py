"""Notices a worker whose events do not reach us: a wrong endpoint or topic looks just like an idle cache.

Sequence numbers cannot show it, because none ever came. But an engine that computes prompts fills blocks, and it
announces them; its own counters say how much it computed.
"""

from __future__ import annotations

from kvrelay.edge.connectors.base import Scrape

SILENT_AFTER_TOKENS = 4096  # computed without a single event; prompts below a block are computed without any


class EventSilence:
    """Of one incarnation."""

    def __init__(self) -> None:
        self._computed_before_tokens: int | None = None
        self._unheard_tokens = 0
        self._looked_at_tokens = 0
        self.problem: str | None = None
        """What an operator should know; None while nothing points to it."""

    def observe(self, scrape: Scrape, *, heard: bool) -> None:
        """`heard`: at least one event of this incarnation came, live or replayed. Events of the last step may still be
        on their way, so only what the scrape before had shown already counts."""
        computed_tokens = _computed_tokens(scrape)
        if computed_tokens is None:
            return
        if heard or self._computed_before_tokens is None:
            self._computed_before_tokens = computed_tokens
            self._unheard_tokens = 0
        self.problem = None
        if self._unheard_tokens >= SILENT_AFTER_TOKENS:
            computed = f"it computed {self._unheard_tokens} prompt tokens and not one event of it came"
            self.problem = f"{computed}; are `events` and `topic` right?"
        self._unheard_tokens = computed_tokens - self._computed_before_tokens

    def worth_a_look(self) -> bool:
        """More was computed in silence since this was last answered with True: a replay may say why."""
        grown = self._unheard_tokens > self._looked_at_tokens
        self._looked_at_tokens = self._unheard_tokens
        return grown


def _computed_tokens(scrape: Scrape) -> int | None:
    if scrape.prefix_queries_tokens is None or scrape.prefix_hits_tokens is None:
        return None
    return scrape.prefix_queries_tokens - scrape.prefix_hits_tokens
