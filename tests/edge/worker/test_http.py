"""The worker's HTTP surface against a real process."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from kvrelay.edge.worker.launch import RunningWorker
from tests.edge.worker.conftest import Client

_fresh = count(1)


def fresh_prompt(tokens: int) -> list[int]:
    """Token ids that no other test has used, so that nothing is cached."""
    start = 1000 + 500 * next(_fresh)
    return list(range(start, start + tokens))


# --- completions -------------------------------------------------------------------------------------------------


@pytest.mark.covers("MK-07", "MK-06")
def test_a_completion_has_the_engines_shape_and_says_that_it_is_a_mock(
    client: Client, shared_worker: RunningWorker
) -> None:
    answer = client.complete(model="mock-model", prompt=fresh_prompt(40), max_tokens=32)
    assert answer.status == 200 and answer.headers["x-kvrelay-mock"] == "1"
    body = answer.json()
    assert body["object"] == "text_completion" and body["model"] == "mock-model" and body["id"].startswith("cmpl-")
    (choice,) = body["choices"]
    assert choice["index"] == 0 and choice["finish_reason"] == "length" and len(choice["text"]) == 32
    assert body["usage"] == {
        "prompt_tokens": 40,
        "completion_tokens": 32,
        "total_tokens": 72,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert body["kvrelay_mock"] == {
        "mock": True,
        "models_payload": False,
        "incarnation": shared_worker.incarnation,
        "wrong_reuse_blocks": 0,
    }


def test_cached_tokens_are_full_blocks_and_never_the_whole_prompt(client: Client) -> None:
    prompt = fresh_prompt(48)
    texts = []
    for expected in (0, 32, 32):
        body = client.complete(prompt=prompt, max_tokens=4).json()
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == expected
        texts.append(body["choices"][0]["text"])
    assert len(set(texts)) == 1, "the same prompt gives the same text, hit or not"


def test_a_stream_has_one_chunk_per_token_the_reason_in_the_last_and_usage_only_if_asked(client: Client) -> None:
    prompt = fresh_prompt(20)
    whole = client.complete(prompt=prompt, max_tokens=5).json()
    answer = client.complete(prompt=prompt, max_tokens=5, stream=True, stream_options={"include_usage": True})
    assert answer.headers["content-type"].startswith("text/event-stream") and answer.headers["x-kvrelay-mock"] == "1"
    *tokens, usage = answer.chunks()
    assert "".join(chunk["choices"][0]["text"] for chunk in tokens) == whole["choices"][0]["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in tokens] == [None] * 4 + ["length"]
    assert usage["choices"] == [] and usage["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
    assert usage["kvrelay_mock"]["models_payload"] is False
    plain = client.complete(prompt=prompt, max_tokens=5, stream=True).chunks()
    assert len(plain) == 5 and all("usage" not in chunk for chunk in plain)
    assert plain[-1]["kvrelay_mock"]["mock"] is True


def test_chat_streams_its_role_first(client: Client) -> None:
    messages = [{"role": "user", "content": "hello"}]
    whole = client.post("/v1/chat/completions", {"messages": messages, "max_tokens": 6}).json()
    assert whole["object"] == "chat.completion" and whole["id"].startswith("chatcmpl-")
    assert whole["choices"][0]["message"]["role"] == "assistant"
    chunks = client.post("/v1/chat/completions", {"messages": messages, "max_tokens": 6, "stream": True}).chunks()
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"]


@pytest.mark.covers("MK-07")
def test_a_chat_without_a_limit_ends_by_itself_and_ignore_eos_goes_to_the_limit(client: Client) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = client.post("/v1/chat/completions", {"messages": messages}).json()
    assert body["choices"][0]["finish_reason"] == "stop" and body["usage"]["completion_tokens"] == 128
    body = client.post("/v1/chat/completions", {"messages": messages, "max_completion_tokens": 150}).json()
    assert body["choices"][0]["finish_reason"] == "length" and body["usage"]["completion_tokens"] == 150


def test_text_parts_are_the_tokens_that_tokenize_says(client: Client) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    joined = [{"role": "user", "content": "one\ntwo"}]
    said = client.post("/tokenize", {"messages": parts}).json()
    assert said["tokens"] == client.post("/tokenize", {"messages": joined}).json()["tokens"]
    body = client.post("/v1/chat/completions", {"messages": parts, "max_tokens": 1, "return_token_ids": True}).json()
    assert body["prompt_token_ids"] == said["tokens"] and body["usage"]["prompt_tokens"] == said["count"]


@pytest.mark.parametrize(
    ("prompt", "n", "choices", "prompt_tokens"),
    [("abc", 1, 1, 3), (["abc", "defg"], 1, 2, 7), ([1, 2, 3], 2, 2, 3), ([[1, 2], [3, 4, 5]], 2, 4, 5)],
)
def test_prompt_shapes(client: Client, prompt: Any, n: int, choices: int, prompt_tokens: int) -> None:
    body = client.complete(prompt=prompt, n=n, max_tokens=3).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(choices))
    assert body["usage"]["prompt_tokens"] == prompt_tokens and body["usage"]["completion_tokens"] == 3 * choices


def test_samples_of_one_prompt_differ(client: Client) -> None:
    body = client.complete(prompt=fresh_prompt(20), n=3, max_tokens=16).json()
    assert len({choice["text"] for choice in body["choices"]}) == 3


def test_return_token_ids(client: Client) -> None:
    body = client.complete(prompt=[5, 6, 7], max_tokens=3, return_token_ids=True).json()
    (choice,) = body["choices"]
    assert choice["prompt_token_ids"] == [5, 6, 7]
    assert bytes(choice["token_ids"]).decode() == choice["text"]
    chunks = client.complete(prompt=[5, 6, 7], max_tokens=3, return_token_ids=True, stream=True).chunks()
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[token] for token in choice["token_ids"]]


@pytest.mark.covers("S18")
def test_adapters_are_models_of_their_own(client: Client) -> None:
    prompt = fresh_prompt(40)
    cached = [
        client.complete(model=model, prompt=prompt, max_tokens=1).json()["usage"]["prompt_tokens_details"][
            "cached_tokens"
        ]
        for model in ("ad-x", "ad-x", "ad-y", "mock-model")
    ]
    assert cached == [0, 32, 0, 0]


def test_cache_salt_separates(client: Client) -> None:
    prompt = fresh_prompt(40)
    cached = [
        client.complete(prompt=prompt, max_tokens=1, cache_salt=salt).json()["usage"]["prompt_tokens_details"][
            "cached_tokens"
        ]
        for salt in ("s", "s", "t", None)
    ]
    assert cached == [0, 32, 0, 0]


def test_the_clients_request_id_names_the_answer(client: Client) -> None:
    body = client.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, {"X-Request-Id": "abc-1"}).json()
    assert body["id"] == "cmpl-abc-1"


def test_output_is_cut_at_the_context_length(client: Client) -> None:
    body = client.complete(prompt=fresh_prompt(4000), max_tokens=400).json()
    assert body["usage"]["completion_tokens"] == 96 and body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("body", "status", "kind", "words"),
    [
        ({"prompt": list(range(4096)), "max_tokens": 1}, 400, "BadRequestError", "maximum context length is 4096"),
        ({"prompt": "x", "model": "nope"}, 404, "NotFoundError", "`nope` does not exist"),
        ({"prompt": ""}, 400, "BadRequestError", "empty"),
        ({"prompt": []}, 400, "BadRequestError", "`prompt` must be"),
        ({}, 400, "BadRequestError", "`prompt` must be"),
        ({"prompt": "x", "max_tokens": 0}, 400, "BadRequestError", "max_tokens must be at least 1"),
        ({"prompt": [1, 200_000]}, 400, "BadRequestError", "200000 is out of vocabulary"),
        ({"prompt": [-1]}, 400, "BadRequestError", "negative"),
        ({"prompt": [1, "x"]}, 400, "BadRequestError", "list of token ids"),
        ({"prompt": "x", "cache_salt": ""}, 400, "BadRequestError", "cache_salt"),
        ({"prompt": "x", "max_tokens": "many"}, 400, "BadRequestError", "max_tokens"),
        ({"prompt": "x", "n": 0}, 400, "BadRequestError", "`n`"),
    ],
)
def test_errors_have_the_engines_shape(
    client: Client, body: dict[str, Any], status: int, kind: str, words: str
) -> None:
    answer = client.post("/v1/completions", body)
    assert answer.status == status and answer.headers["x-kvrelay-mock"] == "1"
    error = answer.json()["error"]
    assert error["type"] == kind and error["code"] == status and words in error["message"]


def test_bad_json_wrong_content_type_wrong_method_and_unknown_path(client: Client) -> None:
    json_type = {"content-type": "application/json"}
    assert client.ask("POST", "/v1/completions", b"{", json_type).status == 400
    assert client.ask("POST", "/v1/completions", b"{}", {"content-type": "text/plain"}).status == 400
    assert client.get("/v1/completions").status == 405
    assert client.get("/v1/nothing").status == 404


def test_a_stream_with_a_bad_token_is_a_200_with_an_error_chunk(client: Client) -> None:
    answer = client.complete(prompt=[1, 200_000], stream=True)
    assert answer.status == 200
    (chunk,) = answer.chunks()
    assert "out of vocabulary" in chunk["error"]["message"]


# --- the other paths ---------------------------------------------------------------------------------------------


def test_tokenize_and_detokenize_are_inverse_and_know_special_tokens(client: Client) -> None:
    text = "grüße <|im_start|>x"
    said = client.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert said["count"] == len(said["tokens"]) == len(text.encode()) - len("<|im_start|>") + 1
    assert 257 in said["tokens"] and said["max_model_len"] == 4096
    assert client.post("/detokenize", {"tokens": said["tokens"]}).json()["prompt"] == text
    assert client.post("/tokenize", {"nothing": 1}).status == 400
    assert client.post("/detokenize", {"tokens": "x"}).status == 400


def test_models_lists_adapters_with_their_parent(client: Client) -> None:
    entries = {entry["id"]: entry for entry in client.get("/v1/models").json()["data"]}
    assert list(entries) == ["mock-model", "ad-x", "ad-y"]
    assert entries["mock-model"]["parent"] is None and entries["mock-model"]["max_model_len"] == 4096
    assert entries["ad-x"]["parent"] == "mock-model"


def test_small_paths(client: Client, shared_worker: RunningWorker) -> None:
    assert client.get("/health").status == client.get("/ping").status == 200
    assert client.get("/health").headers["x-kvrelay-mock"] == "1"
    assert client.get("/version").json()["version"].endswith("+mock")
    assert client.get("/load").json() == {"server_load": 0}
    assert client.get("/server_info").json()["kvrelay_mock"]["settings"]["name"] == "quick"
    assert client.get("/kv_event_sources").json() == {
        "0": {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": shared_worker.events,
            "replay_endpoint": shared_worker.replay,
            "topic": "kv@quick@mock-model",
        }
    }
    state = client.state()
    assert state["pid"] == shared_worker.pid and state["incarnation"] == shared_worker.incarnation


def test_reset_forgets_when_idle_and_fails_while_something_runs(start: Callable[..., RunningWorker]) -> None:
    client = Client(start(prefill_tokens_per_s=1e6, decode_ms=1.0).url)
    prompt = list(range(40))

    def cached() -> int:
        body = client.complete(prompt=prompt, max_tokens=1).json()
        return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached(), cached()] == [0, 32]
    assert client.ask("POST", "/reset_prefix_cache").json() == {"success": True}
    assert cached() == 0
    with Abandoned(client, {"prompt": [7] * 20, "max_tokens": 20_000, "stream": True}) as running:
        running.read_some()
        assert client.ask("POST", "/reset_prefix_cache").json() == {"success": False}
    assert cached() == 32


def metric(page: str, name: str, labels: str = "") -> float:
    found = re.search(rf"^{re.escape(name)}(\{{[^}}]*{labels}[^}}]*\}})? (\S+)$", page, re.MULTILINE)
    assert found is not None, f"{name} is not on the page"
    return float(found[2])


def test_metrics_have_the_engines_names_and_add_up(start: Callable[..., RunningWorker]) -> None:
    worker = start(prefill_tokens_per_s=1e6, decode_ms=0.5)
    client = Client(worker.url)
    for _ in range(2):
        client.complete(prompt=list(range(40)), max_tokens=5)
    page = client.get("/metrics").body.decode()
    assert metric(page, "vllm:prompt_tokens_total") == 80
    assert metric(page, "vllm:prefix_cache_queries_total") == 80
    assert metric(page, "vllm:prefix_cache_hits_total") == 32
    assert metric(page, "vllm:prompt_tokens_by_source_total", 'source="local_compute"') == 48
    assert metric(page, "vllm:generation_tokens_total") == 10
    assert metric(page, "vllm:request_success_total", 'finished_reason="length"') == 2
    assert metric(page, "vllm:time_to_first_token_seconds_count") == 2
    assert metric(page, "vllm:inter_token_latency_seconds_count") == 8
    assert metric(page, "vllm:num_requests_running") == metric(page, "vllm:kv_cache_usage_perc") == 0
    assert metric(page, "kvrelay_mock_wrong_reuse_blocks_total") == 0
    assert 'engine="0",model_name="mock-model"' in page and 'block_size="16"' in page
    assert metric(page, "process_start_time_seconds") > 1.6e9
    assert f'incarnation="{worker.incarnation}",models_payload="false"' in page


def test_the_metrics_page_parses(client: Client) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    families = {family.name: family for family in text_string_to_metric_families(client.get("/metrics").body.decode())}
    assert families["vllm:prompt_tokens"].type == "counter"
    assert families["vllm:e2e_request_latency_seconds"].type == "histogram"


# --- clients that leave ------------------------------------------------------------------------------------------


class Abandoned:
    """A request whose connection is closed at the end of the block, answered or not."""

    def __init__(self, client: Client, body: dict[str, Any]) -> None:
        payload = json.dumps(body).encode()
        self._socket = socket.create_connection((client.host, client.port), timeout=10)
        self._socket.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: gone-1\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(payload), payload)
        )

    def read_some(self) -> bytes:
        """At least the head and one chunk of a stream."""
        data = b""
        while data.count(b"data: ") < 1:
            data += self._socket.recv(4096)
        return data

    def __enter__(self) -> Abandoned:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_the_engine_at_once(start: Callable[..., RunningWorker], stream: bool) -> None:
    client = Client(start(decode_ms=5.0, prefill_tokens_per_s=1e6).url)
    with Abandoned(client, {"prompt": [1] * 40, "max_tokens": 4000, "stream": stream}) as request:
        if stream:
            request.read_some()
        while client.state()["running"] == 0:
            time.sleep(0.01)
        left_s = time.monotonic()
    deadline = time.monotonic() + 5.0
    while client.state()["aborts_total"] == 0 and time.monotonic() < deadline:
        time.sleep(0.005)
    state = client.state()
    assert state["aborts_total"] == 1 and state["running"] == 0 and state["kv_usage_ratio"] == 0.0
    (abort,) = state["aborts"]
    assert abort["request_id"] == "gone-1"
    assert 0.0 <= abort["seen_at"] - left_s < 1.0
    assert state["counters"]["finished"]["abort"] == 0, "vLLM's success counter leaves these out"


@pytest.mark.covers("S31")
def test_a_key_is_wanted_below_v1_and_shown_nowhere(start: Callable[..., RunningWorker]) -> None:
    keyed = Client(start(api_key="the-key").url)
    body = {"prompt": [1, 2, 3], "max_tokens": 1}
    answers = [keyed.post("/v1/completions", body, {"authorization": f"Bearer {key}"}) for key in ("the-key", "the-ke")]
    assert [answer.status for answer in answers] == [200, 401]
    assert (keyed.get("/v1/models").status, keyed.get("/health").status, keyed.get("/metrics").status) == (
        401,
        200,
        200,
    )
    pages = [keyed.get(path).body for path in ("/server_info", "/mock/state", "/metrics")]
    assert not any(b"the-key" in page for page in pages)
