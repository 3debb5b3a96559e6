"""Metric pages of several engine releases in canonical words."""

from __future__ import annotations

import pytest

from kvrelay.edge.connectors.base import ReportedLoad
from kvrelay.edge.connectors.metrics_page import increase
from kvrelay.edge.connectors.vllm.metrics_map import MAP, cache_block_size_tokens, scrape

CURRENT = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1.5e+03
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.76e+09
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 640.0
vllm:cache_config_info{block_size="32",engine="0",kv_cache_size_tokens="1248",num_gpu_blocks="39"} 1.0
process_start_time_seconds 1.76441122e+09
"""


@pytest.mark.covers("S40")
def test_a_current_page() -> None:
    page = MAP.read(CURRENT)
    found = scrape(page)
    assert found.ranks == {0: ReportedLoad(running_requests=3, waiting_requests=2, kv_usage_ratio=0.25)}
    assert (found.prefix_queries_tokens, found.prefix_hits_tokens) == (1500, 640)
    assert found.process_start_s == 1764411220.0
    assert cache_block_size_tokens(page) == 32


def test_hits_are_told_apart_by_tier_where_the_engine_does() -> None:
    line = 'vllm:prompt_tokens_cached_by_source_total{engine="%s",source="%s"} %d\n'
    page = "".join(line % one for one in (("0", "device", 5), ("1", "device", 2), ("0", "p2p", 3), ("0", "mine", 4)))
    assert scrape(MAP.read(page)).hits_by_tier_tokens == {"gpu": 7, "peer": 3, "remote": 4}
    assert scrape(MAP.read(CURRENT)).hits_by_tier_tokens == {}


@pytest.mark.covers("S40")
def test_older_names_without_suffix_and_with_timestamps() -> None:
    found = scrape(
        MAP.read(
            'vllm:gpu_prefix_cache_hits{model_name="m"} 7 1764411220000\n'
            'vllm:gpu_prefix_cache_queries{model_name="m"} 9\n'
            'vllm:gpu_cache_usage_perc{model_name="m"} 0.5\n'
        )
    )
    assert (found.prefix_hits_tokens, found.prefix_queries_tokens) == (7, 9)
    assert found.ranks == {0: ReportedLoad(kv_usage_ratio=0.5)}


@pytest.mark.covers("S40")
def test_series_of_several_engines() -> None:
    found = scrape(
        MAP.read(
            'vllm:num_requests_running{engine="0"} 1\nvllm:num_requests_running{engine="1"} 2\n'
            'vllm:kv_cache_usage_perc{engine="1"} 0.75\n'
            'vllm:prefix_cache_hits_total{engine="0"} 10\nvllm:prefix_cache_hits_total{engine="1"} 20\n'
        )
    )
    assert found.ranks == {
        0: ReportedLoad(running_requests=1),
        1: ReportedLoad(running_requests=2, kv_usage_ratio=0.75),
    }
    assert found.prefix_hits_tokens == 30


@pytest.mark.covers("S40")
@pytest.mark.parametrize("text", ["", "not a page", "vllm:num_requests_running NaN\n", "vllm:num_requests_running x\n"])
def test_what_is_missing_or_unreadable_is_unknown_and_never_zero(text: str) -> None:
    page = MAP.read(text)
    found = scrape(page)
    assert found.ranks == {}
    assert (found.prefix_hits_tokens, found.prefix_queries_tokens, found.process_start_s) == (None, None, None)
    assert cache_block_size_tokens(page) is None


def test_label_values_may_hold_quotes_braces_and_commas() -> None:
    page = MAP.read('vllm:cache_config_info{dtype="a,b=\\"}{",block_size="16"} 1.0\n')
    assert cache_block_size_tokens(page) == 16


def test_ranks_that_disagree_about_the_block_size_leave_it_unknown() -> None:
    page = MAP.read(
        'vllm:cache_config_info{engine="0",block_size="16"} 1\nvllm:cache_config_info{engine="1",block_size="32"} 1\n'
    )
    assert cache_block_size_tokens(page) is None


def test_a_block_size_that_is_no_number_is_unknown() -> None:
    assert cache_block_size_tokens(MAP.read('vllm:cache_config_info{block_size="None"} 1\n')) is None


@pytest.mark.covers("S40")
@pytest.mark.parametrize(("before", "after", "gained"), [(5, 9, 4), (9, 4, 4), (None, 4, None), (4, None, None)])
def test_a_reset_counter_yields_no_negative_increase(before: int | None, after: int | None, gained: int | None) -> None:
    assert increase(before, after) == gained
