"""llama.cpp's metrics page (`--metrics`) in canonical words.

It counts computed and reused prompt tokens apart, so the tokens asked for are their sum; where a build does not count
the reused ones, the sum is unknown. Only older builds say how full their cache is.
"""

from __future__ import annotations

from kvrelay.edge.connectors.base import Scrape
from kvrelay.edge.connectors.metrics_page import MetricsMap, Page, whole

MAP = MetricsMap(
    {
        "running_requests": ("llamacpp:requests_processing",),
        "waiting_requests": ("llamacpp:requests_deferred",),
        "kv_usage_ratio": ("llamacpp:kv_cache_usage_ratio",),
        "prefix_queries_tokens": ("llamacpp:prompt_tokens",),  # the computed part
        "prefix_hits_tokens": ("llamacpp:prompt_tokens_cached",),
        "hits_by_tier_tokens": (),
        "process_start_s": (),  # in a header of the answer, and on another clock
        "cache_config": (),
    }
)


def scrape(page: Page, *, started_us: str | None) -> Scrape:
    """`started_us` is the header of the answer."""
    computed, hits = page.sum("prefix_queries_tokens"), page.sum("prefix_hits_tokens")
    return Scrape(
        ranks=page.loads(),
        process_start_s=int(started_us) / 1e6 if started_us and started_us.isdecimal() else None,
        prefix_queries_tokens=None if computed is None or hits is None else whole(computed + hits),
        prefix_hits_tokens=whole(hits),
    )
