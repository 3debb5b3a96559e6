"""SGLang's metrics page in canonical words.

Prompt and cached tokens are counted when a request ends; cached ones once per source (device, host, storage), and the
series does not exist before the first hit. `sglang:cache_hit_rate` is a gauge of the last batch and not used: a ratio
of what cannot be added up. The page is put together from several processes and has no start time; the measured
durations of the start (`sglang:startup_time_seconds`, by phase) differ from one life to the next just as well. Gauges
come once per tensor-parallel rank where the server was told to export all of them.
"""

from __future__ import annotations

from kvrelay.edge.connectors.base import Scrape
from kvrelay.edge.connectors.metrics_page import MetricsMap, Page, whole

MAP = MetricsMap(
    {
        "running_requests": ("sglang:num_running_reqs",),
        "waiting_requests": ("sglang:num_queue_reqs",),
        "kv_usage_ratio": ("sglang:token_usage",),
        "prefix_queries_tokens": ("sglang:prompt_tokens",),
        "prefix_hits_tokens": ("sglang:cached_tokens",),
        "hits_by_tier_tokens": (),
        "process_start_s": ("sglang:startup_time_seconds",),
        "cache_config": (),
    },
    rank_label="dp_rank",
    leaders={"tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"},
)


def scrape(page: Page) -> Scrape:
    return Scrape(
        ranks=page.loads(),
        process_start_s=page.sum("process_start_s"),
        prefix_queries_tokens=whole(page.sum("prefix_queries_tokens")),
        prefix_hits_tokens=whole(page.sum("prefix_hits_tokens")),
    )
