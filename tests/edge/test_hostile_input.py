"""What comes from outside may be anything: it is read, refused or left alone, and never an error of ours."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrelay.core.model.prompt import Usage
from kvrelay.edge.agent.wire import AgentMessageError
from kvrelay.edge.agent.wire import decode as decode_agent
from kvrelay.edge.connectors.ask import Answer, as_json
from kvrelay.edge.connectors.base import MalformedEvents, WorkerAnswerUnusable
from kvrelay.edge.connectors.usage import usage_from_body, usage_from_sse
from kvrelay.edge.connectors.vllm.events import decode_batch
from kvrelay.edge.gateway.gave_up import gave_up
from kvrelay.edge.gateway.heads import read_head
from kvrelay.edge.gateway.openai import SCORED_PATHS, RequestBody, read_body, with_salt
from kvrelay.edge.gateway.unasked_usage import UsageFilter
from tests.edge.gateway.scripted import ScriptedWorker, client_of, running

DEPTH = 100_000
DEEP_JSON = (b"[" * DEPTH, b'{"a":' * DEPTH)
DEEP_MSGPACK = (b"\x91" * DEPTH, b"\x93\xcb\x00\x00\x00\x00\x00\x00\x00\x00" + b"\x91" * DEPTH, b"\x81\xa1a" * DEPTH)


@pytest.mark.parametrize("deep", DEEP_JSON)
@pytest.mark.parametrize("before", [b"", b'{"usage":', b'{"usage":{"prompt_tokens":', b'{"choices":[],"usage":{"x":'])
def test_an_answer_nested_without_end_has_no_counts(before: bytes, deep: bytes) -> None:
    assert usage_from_body(before + deep) == Usage()
    event = b"data: " + before + b'"prompt_tokens" "usage"' + deep + b"\n\n"
    assert usage_from_sse(event) == Usage()
    watching = UsageFilter()
    assert watching.take(event) + watching.rest() == event
    assert not gave_up(b'data: {"error":' + deep + b"\n\n")


@pytest.mark.covers("S16")
@pytest.mark.parametrize("deep", DEEP_MSGPACK)
def test_an_event_nested_without_end_is_malformed(deep: bytes) -> None:
    with pytest.raises(MalformedEvents):
        decode_batch(deep)
    with pytest.raises(AgentMessageError):
        decode_agent(deep)


@pytest.mark.parametrize("deep", DEEP_JSON)
def test_a_description_nested_without_end_is_unusable(deep: bytes) -> None:
    with pytest.raises(WorkerAnswerUnusable, match="http://w"):
        as_json(Answer(200, {}, deep), "http://w", dict[str, Any])


@pytest.mark.parametrize("deep", DEEP_JSON)
@pytest.mark.parametrize("member", ["prompt", "messages", "tools", "stream_options", "model", "cache_salt", "x"])
def test_a_body_nested_without_end_is_not_scored(member: str, deep: bytes) -> None:
    for path in SCORED_PATHS:
        assert isinstance(read_body(path, b'{"%b":' % member.encode() + deep), RequestBody)
    assert with_salt(b'{"%b":' % member.encode() + deep, "salt") is None


async def test_orders_nested_without_end_and_numbers_that_are_none_are_refused() -> None:
    async with running(ScriptedWorker("a")) as gateway, client_of(gateway) as client:
        for method, path in (("POST", "/admin/workers"), ("PUT", "/admin/policy")):
            async with client._session.request(method, gateway.admin_url + path, data=DEEP_JSON[1]) as response:
                assert response.status == 400 and (await response.json())["error"]["message"]
        for limit in ("%C2%B2", "%D9%A3", "9" * 5000, "-1", "1e3", "+5", "%205", ""):
            status, said = await client.admin("GET", f"/admin/receipts?limit={limit}")
            assert status == 400 and "legal: 1 to 1000" in said["error"]["message"], limit


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)
MEMBERS = st.sampled_from(
    ["model", "prompt", "messages", "stream", "stream_options", "max_tokens", "tools", "cache_salt", "content", "role"]
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(SCORED_PATHS)), st.dictionaries(MEMBERS, VALUES), st.randoms(use_true_random=False))
def test_every_body_is_read(path: str, body: dict[str, Any], chance: random.Random) -> None:
    raw = msgspec.json.encode(body)
    assert isinstance(read_body(path, raw), RequestBody)
    salted = with_salt(raw, "salt")
    assert salted is not None and msgspec.json.decode(salted[0])["cache_salt"] == salted[1]
    place = chance.randrange(len(raw))
    assert isinstance(read_body(path, raw[:place] + bytes([chance.randrange(256)]) + raw[place + 1 :]), RequestBody)


HEADERS = ("authorization", "x-api-key", "connection", "x-session-id", "x-request-id", "x-kvrelay-priority", "digest")


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from([name.encode() for name in HEADERS]), st.binary(max_size=40))))
def test_every_head_is_read(headers: list[tuple[bytes, bytes]]) -> None:
    head = read_head(headers, b"x-session-id")
    assert head.request_id is None or head.request_id.isascii()
    assert -1000 <= head.priority <= 1000


@settings(deadline=None)
@given(st.binary(max_size=200), st.sampled_from([usage_from_body, usage_from_sse]))
def test_every_answer_is_read(data: bytes, read: Callable[[bytes], Usage]) -> None:
    assert isinstance(read(b'data: {"usage":' + data), Usage) and isinstance(read(data), Usage)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_every_event_message_is_read_or_malformed(payload: bytes) -> None:
    for raw in (payload, b"\x93\x00\x91" + payload, msgspec.msgpack.encode([0.0, [payload], 0])):
        try:
            decode_batch(raw)
        except MalformedEvents:
            pass
