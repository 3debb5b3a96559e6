"""What a worker of each kind answers, as its real server does, and what the connector must make of it.

vLLM: from the real 0.32.0. llama.cpp: recorded from its real server, build 11549. SGLang: laid out as the sources of
0.5.23 do, with events that its own classes encoded. The generic one: what OpenAI's documentation promises.
A new connector gets a double here and has to pass what all others pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from kvrelay.core.model.prompt import Usage
from kvrelay.edge.connectors.base import EventSource, ReportedLoad, Scrape
from tests.edge.connectors.serving import Answered, Pages
from tests.edge.connectors.sglang.frames import MAPS


class Described(Struct, frozen=True):
    """The parts of a description that every connector fills or leaves empty knowingly."""

    models: tuple[str, ...]
    block_size_tokens: int | None
    version: str | None
    sources: tuple[EventSource, ...] = ()
    ranks: int = 1


class Double(Struct, frozen=True):
    pages: Pages
    another_life: Pages  # what changes when the process is another one
    described: Described
    tells_lives: bool
    unhealthy: Pages
    scrape: Scrape | None
    unavailable: tuple[str, ...]  # canonical metrics that this page does not carry
    body: bytes  # of a whole answer
    stream: bytes  # the end of a streamed one
    usage: Usage  # in both
    event: bytes | None = None  # one batch: stored [10, 11, 12, 130000] in blocks of 2
    resets: str | None = None  # the order that drops its cache
    refuses: Answered | None = None  # its answer while it cannot
    tokenize: Mapping[str, Any] | None = None  # page -> what it must have been asked, for a text and for a chat
    tokens: tuple[int, ...] = ()


def _usage(cached: int) -> str:
    return (
        '"usage":{"completion_tokens":4,"prompt_tokens":92,"total_tokens":96,'
        f'"prompt_tokens_details":{{"cached_tokens":{cached}}}}}'
    )


def _models(owner: str) -> Answered:
    return Answered(f'{{"object":"list","data":[{{"id":"m","object":"model","owned_by":"{owner}"}}]}}')


OPENAI_BODY = (f'{{"id":"c","object":"text_completion","choices":[{{"index":0,"text":"hi"}}],{_usage(64)}}}').encode()
OPENAI_STREAM = (
    'data: {"id":"c","choices":[{"index":0,"text":"hi"}],"usage":null}\n\n'
    f'data: {{"id":"c","choices":[],{_usage(64)}}}\n\ndata: [DONE]\n\n'
).encode()

OPENAI = Double(
    pages={"GET /v1/models": _models("somebody")},
    another_life={},
    described=Described(("m",), block_size_tokens=16, version=None),
    tells_lives=False,
    unhealthy={"GET /v1/models": Answered(status=503)},
    scrape=None,
    unavailable=(
        "running_requests",
        "waiting_requests",
        "kv_usage_ratio",
        "prefix_queries_tokens",
        "prefix_hits_tokens",
        "hits_by_tier_tokens",
        "process_start_s",
        "cache_config",
    ),
    body=OPENAI_BODY,
    stream=OPENAI_STREAM,
    usage=Usage(92, 4, 64),
)

VLLM_METRICS = """\
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1500.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 640.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source="device"} 640.0
vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="39"} 1.0
process_start_time_seconds 1.76441122e+09
"""
STORED = {
    "type": "BlockStored",
    "block_hashes": [2**64 - 2, 7],
    "parent_block_hash": None,
    "token_ids": [10, 11, 12, 130_000],
    "block_size": 2,
    "medium": "GPU",
}
VLLM_EVENT = msgspec.msgpack.encode([1764411220.25, [STORED], 0])
VLLM_SOURCES = '{"0": {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", "topic": "kv@m"}}'
LOAD = ReportedLoad(running_requests=3, waiting_requests=2, kv_usage_ratio=0.25)

VLLM = Double(
    pages={
        "GET /v1/models": _models("vllm"),
        "GET /health": Answered(),
        "GET /metrics": Answered(VLLM_METRICS),
        "GET /version": Answered('{"version": "0.32.0"}'),
        "GET /kv_event_sources": Answered(VLLM_SOURCES),
        "POST /reset_prefix_cache": Answered('{"success": true}'),
        "POST /tokenize": Answered('{"count": 3, "max_model_len": 8192, "tokens": [1, 100, 101]}'),
    },
    another_life={"GET /metrics": Answered(VLLM_METRICS.replace("1.76441122e+09", "1.76441133e+09"))},
    described=Described(
        ("m",),
        block_size_tokens=32,
        version="0.32.0",
        sources=(EventSource(0, "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558", "kv@m"),),
    ),
    tells_lives=True,
    unhealthy={"GET /health": Answered(status=503)},
    scrape=Scrape(
        {0: LOAD},
        process_start_s=1764411220.0,
        prefix_queries_tokens=1500,
        prefix_hits_tokens=640,
        hits_by_tier_tokens={"gpu": 640},
    ),
    unavailable=(),
    body=OPENAI_BODY,
    stream=OPENAI_STREAM,
    usage=Usage(92, 4, 64),
    event=VLLM_EVENT,
    resets="POST /reset_prefix_cache",
    refuses=Answered('{"success": false}'),
    tokenize={"POST /tokenize": ({"prompt": "ab"}, {"messages": [{"role": "user", "content": "ab"}]})},
    tokens=(1, 100, 101),
)

MOCK_MARK = {"x-kvrelay-mock": "1"}
MOCK = msgspec.structs.replace(
    VLLM,
    pages={
        **VLLM.pages,
        "GET /v1/models": Answered(_models("kvrelay").body, headers=MOCK_MARK),
        "GET /mock/state": Answered('{"incarnation": "i1", "events_mode": "bind"}'),
    },
    another_life={
        "GET /mock/state": Answered('{"incarnation": "i2", "events_mode": "bind"}'),
        **VLLM.another_life,
    },
)

SGLANG_LABELS = 'engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"'
SGLANG_METRICS = f"""\
# HELP sglang:num_running_reqs The number of running requests.
sglang:num_running_reqs{{{SGLANG_LABELS}}} 3.0
sglang:num_running_reqs{{{SGLANG_LABELS.replace('tp_rank="0"', 'tp_rank="1"')}}} 3.0
sglang:num_queue_reqs{{{SGLANG_LABELS}}} 2.0
sglang:token_usage{{{SGLANG_LABELS}}} 0.25
sglang:startup_time_seconds{{engine_type="unified",model_name="m",phase="load_weight"}} 3.25
sglang:startup_time_seconds{{engine_type="unified",model_name="m",phase="tokenizer_e2e"}} 31.125
sglang:cache_hit_rate{{{SGLANG_LABELS}}} 0.9
sglang:prompt_tokens_total{{engine_type="unified",is_streaming="true",model_name="m"}} 1000.0
sglang:prompt_tokens_total{{engine_type="unified",is_streaming="false",model_name="m"}} 500.0
sglang:cached_tokens_total{{cache_source="device",engine_type="unified",model_name="m"}} 600.0
sglang:cached_tokens_total{{cache_source="host",engine_type="unified",model_name="m"}} 40.0
"""


def _server_info(tokenizer_e2e_s: float) -> Answered:
    events = {"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", "topic": "kv@m"}
    info = {
        "version": "0.5.23",
        "page_size": 64,
        "dp_size": 1,
        "random_seed": 7,
        "startup_time": {"load_weight": 3.25, "tokenizer_e2e": tokenizer_e2e_s, "cuda_graph": {"decode": 1.5}},
        "kv_events_config": msgspec.json.encode(events).decode(),
        "kv_events": {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": 5557,
            "replay_endpoint_port_base": 5558,
            "topic": "kv@m",
            "block_size": 64,
            "dp_size": 1,
        },
        "internal_states": [{"anything": [1, 2]}],
    }
    return Answered(msgspec.json.encode(info))


SGLANG = Double(
    pages={
        "GET /v1/models": _models("sglang"),
        "GET /health": Answered(),
        "GET /server_info": _server_info(31.125),
        "GET /metrics": Answered(SGLANG_METRICS),
        "POST /flush_cache": Answered("Cache flushed.\n"),
        "POST /tokenize": Answered('{"tokens": [1, 100, 101], "count": 3, "max_model_len": 8192}'),
    },
    another_life={
        "GET /server_info": _server_info(30.875),
        "GET /metrics": Answered(SGLANG_METRICS.replace("31.125", "30.875")),
    },
    described=Described(
        ("m",),
        block_size_tokens=64,
        version="0.5.23",
        sources=(EventSource(0, "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558", "kv@m"),),
    ),
    tells_lives=True,
    unhealthy={"GET /health": Answered(status=503)},
    scrape=Scrape({0: LOAD}, process_start_s=34.375, prefix_queries_tokens=1500, prefix_hits_tokens=640),
    unavailable=("hits_by_tier_tokens", "cache_config"),
    body=OPENAI_BODY,
    stream=OPENAI_STREAM,
    usage=Usage(92, 4, 64),
    event=MAPS["stored"],
    resets="POST /flush_cache",
    refuses=Answered("Flush cache failed.\n", status=400),
    tokenize={"POST /tokenize": ({"prompt": "ab"}, {"messages": [{"role": "user", "content": "ab"}]})},
    tokens=(1, 100, 101),
)

LLAMACPP_METRICS = """\
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed, excluding cached tokens
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 180
llamacpp:prompt_tokens_cached_total 200
llamacpp:prompt_seconds_total 0.008106
llamacpp:requests_processing 1
llamacpp:requests_deferred 4
llamacpp:n_busy_slots_per_decode 1
"""
LLAMACPP_TIMINGS = '"timings":{"cache_n":91,"prompt_n":1,"prompt_ms":0.382,"predicted_n":4,"predicted_ms":0.408}'
LLAMACPP_MODELS = (
    '{"models":[{"name":"m","model":"m","type":"model","capabilities":["completion"]}],"object":"list","data":[{"id":"m",'
    '"aliases":["m"],"tags":[],"object":"model","created":1795988436,"owned_by":"llamacpp","meta":{"n_ctx":4096}}]}'
)
LLAMACPP = Double(
    pages={
        "GET /v1/models": Answered(LLAMACPP_MODELS),
        "GET /health": Answered('{"status":"ok"}'),
        "GET /props": Answered('{"default_generation_settings":{"n_ctx":4096},"total_slots":2,"build_info":"b11549"}'),
        "GET /metrics": Answered(LLAMACPP_METRICS, headers={"Process-Start-Time-Unix": "11288978019"}),
        "POST /tokenize": Answered('{"tokens":[1,100,101]}'),
        "POST /apply-template": Answered('{"prompt":"<|im_start|>user\\nab"}'),
    },
    another_life={"GET /metrics": Answered(LLAMACPP_METRICS, headers={"Process-Start-Time-Unix": "11335870107"})},
    described=Described(("m",), block_size_tokens=16, version="b11549"),
    tells_lives=True,
    unhealthy={"GET /health": Answered('{"error":{"message":"Loading model","code":503}}', status=503)},
    scrape=Scrape(
        {0: ReportedLoad(running_requests=1, waiting_requests=4)},
        process_start_s=11288.978019,
        prefix_queries_tokens=380,
        prefix_hits_tokens=200,
    ),
    unavailable=("kv_usage_ratio", "hits_by_tier_tokens", "process_start_s", "cache_config"),
    body=(
        f'{{"choices":[{{"text":"hi","index":0,"finish_reason":"length"}}],{_usage(91)},{LLAMACPP_TIMINGS}}}'
    ).encode(),
    stream=(
        'data: {"choices":[{"text":"h","index":0,"finish_reason":null}],"model":"m"}\n\n'
        f'data: {{"choices":[{{"text":"","index":0,"finish_reason":"length"}}],{_usage(91)},{LLAMACPP_TIMINGS}}}\n\n'
        "data: [DONE]\n\n"
    ).encode(),
    usage=Usage(92, 4, 91),
    tokenize={
        "POST /tokenize": (
            {"content": "ab", "add_special": True, "parse_special": True},
            {"content": "<|im_start|>user\nab", "add_special": True, "parse_special": True},
        )
    },
    tokens=(1, 100, 101),
)

DOUBLES: dict[str, Double] = {
    "vllm": VLLM,
    "sglang": SGLANG,
    "llamacpp": LLAMACPP,
    "openai": OPENAI,
    "mock": MOCK,
}
