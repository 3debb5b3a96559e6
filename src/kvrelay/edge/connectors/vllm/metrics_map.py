"""vLLM's metrics page in canonical words.

Releases differ in the `_total` suffix and in which metrics exist; a data-parallel worker repeats each one with another
`engine` label. `prefix_cache_queries` and `prefix_cache_hits` count tokens.
"""

from __future__ import annotations

from kvrelay.core.model.units import Tier
from kvrelay.edge.connectors.base import Scrape
from kvrelay.edge.connectors.metrics_page import MetricsMap, Page, whole

MAP = MetricsMap(
    {
        "running_requests": ("vllm:num_requests_running",),
        "waiting_requests": ("vllm:num_requests_waiting",),
        "kv_usage_ratio": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        "prefix_queries_tokens": ("vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries"),
        "prefix_hits_tokens": ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits"),
        "hits_by_tier_tokens": ("vllm:prompt_tokens_cached_by_source",),
        "process_start_s": ("process_start_time_seconds",),
        "cache_config": ("vllm:cache_config_info",),
    },
    rank_label="engine",
)


_TIERS = {"device": Tier.GPU, "host": Tier.CPU, "disk": Tier.DISK, "p2p": Tier.PEER}


def scrape(page: Page) -> Scrape:
    return Scrape(
        ranks=page.loads(),
        process_start_s=page.latest("process_start_s"),
        prefix_queries_tokens=whole(page.sum("prefix_queries_tokens")),
        prefix_hits_tokens=whole(page.sum("prefix_hits_tokens")),
        hits_by_tier_tokens=_hits_by_tier(page),
    )


def _hits_by_tier(page: Page) -> dict[str, int]:
    """A connector may use labels of its own: what is not one of vLLM's came from outside."""
    tiers: dict[str, int] = {}
    for source, tokens in page.by_label("hits_by_tier_tokens", "source").items():
        tier = _TIERS.get(source.lower(), Tier.REMOTE).value
        tiers[tier] = tiers.get(tier, 0) + round(tokens)
    return tiers


def cache_block_size_tokens(page: Page) -> int | None:
    """From the labels of `cache_config_info`; ranks of one worker share one block size."""
    sizes = {sample.labels.get("block_size", "") for sample in page.samples.get("cache_config", ())}
    if len(sizes) != 1:
        return None
    text = sizes.pop()
    return int(text) if text.isdigit() and int(text) > 0 else None
