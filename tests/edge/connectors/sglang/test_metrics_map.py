"""Pages of SGLang servers, laid out as `metrics_collector.py` of 0.5.23 does."""

from __future__ import annotations

import pytest

from kvrelay.edge.connectors.base import ReportedLoad
from kvrelay.edge.connectors.sglang.metrics_map import MAP, scrape


@pytest.mark.covers("TP-02", "S40")
def test_data_parallel_ranks_are_apart_and_tensor_parallel_ones_count_once() -> None:
    page = "".join(
        f'sglang:num_running_reqs{{dp_rank="{dp}",tp_rank="{tp}",pp_rank="0"}} {dp + 1}\n'
        f'sglang:token_usage{{dp_rank="{dp}",tp_rank="{tp}",pp_rank="0"}} 0.5\n'
        for dp in (0, 1)
        for tp in (0, 1)
    )
    assert scrape(MAP.read(page)).ranks == {
        0: ReportedLoad(running_requests=1, kv_usage_ratio=0.5),
        1: ReportedLoad(running_requests=2, kv_usage_ratio=0.5),
    }


@pytest.mark.covers("TP-02", "OB-10")
def test_hits_are_unknown_until_the_first_one_and_a_rate_is_no_count() -> None:
    found = scrape(MAP.read('sglang:cache_hit_rate{tp_rank="0"} 0.75\nsglang:prompt_tokens_total{a="b"} 10\n'))
    assert (found.prefix_queries_tokens, found.prefix_hits_tokens) == (10, None)
