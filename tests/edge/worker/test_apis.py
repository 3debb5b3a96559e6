"""What else real servers offer: responses, messages, tools, embeddings, audio. SDKs read them in `gateway/clients`."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import pytest

from tests.edge.worker.conftest import Client

TOOL = {"name": "look", "parameters": {"type": "object", "properties": {"where": {"type": "string"}}}}
CHAT_TOOLS = [{"type": "function", "function": TOOL}, {"type": "function", "function": {"name": "go"}}]
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6}
MESSAGE = {"model": "mock-model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6}
GO = {"type": "function", "function": {"name": "go"}}


def named_events(body: bytes) -> list[tuple[str, Any]]:
    """Events with their names; each data line must say the same name again."""
    events = []
    for event in body.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        read = json.loads(data.removeprefix("data: "))
        assert read["type"] == name.removeprefix("event: ")
        events.append((read["type"], read))
    return events


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "tools": CHAT_TOOLS, "tool_choice": "required"}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 6}),
        ("/v1/messages", MESSAGE),
        ("/v1/embeddings", {"input": "hi"}),
    ],
)
def test_equal_requests_have_equal_answers_whatever_is_cached(client: Client, path: str, body: Any) -> None:
    said = []
    for _ in range(2):
        answer = client.post(path, body, {"x-request-id": "same"})
        assert answer.status == 200
        read = answer.json()
        for member in ("created", "created_at", "usage"):
            read.pop(member, None)
        said.append(read)
        assert client.post("/reset_prefix_cache", {}).json() == {"success": True}
    assert said[0] == said[1]


@pytest.mark.covers("S21")
def test_tools_are_part_of_the_prompt_in_their_order(client: Client) -> None:
    variants = [[], CHAT_TOOLS, CHAT_TOOLS[::-1]]
    tokens = [client.post("/tokenize", {**CHAT, "tools": tools}).json()["tokens"] for tools in variants]
    assert len({tuple(each) for each in tokens}) == 3
    for tools, expected in zip(variants, tokens, strict=True):
        usage = client.post("/v1/chat/completions", {**CHAT, "tools": tools}).json()["usage"]
        assert usage["prompt_tokens"] == len(expected)


def test_a_tool_is_called_if_and_only_if_it_must_be(client: Client) -> None:
    for choice, name, argument in (("required", "look", "where"), (GO, "go", "text")):
        body = {**CHAT, "tools": CHAT_TOOLS, "tool_choice": choice}
        (said,) = client.post("/v1/chat/completions", body).json()["choices"]
        (call,) = said["message"]["tool_calls"]
        assert call["function"]["name"] == name and said["message"]["content"] is None
        assert len(json.loads(call["function"]["arguments"])[argument]) == 6
    for choice in (None, "auto", "none"):
        body = {**CHAT, "tools": CHAT_TOOLS, "tool_choice": choice}
        (said,) = client.post("/v1/chat/completions", body).json()["choices"]
        assert said["message"]["content"] and "tool_calls" not in said["message"]


def test_a_streamed_call_comes_in_pieces_that_make_the_whole_one(client: Client) -> None:
    body = {**CHAT, "tools": CHAT_TOOLS, "tool_choice": "required", "max_tokens": None}
    (whole,) = client.post("/v1/chat/completions", body).json()["choices"]
    chunks = client.post("/v1/chat/completions", {**body, "stream": True}).chunks()
    calls = [chunk["choices"][0]["delta"]["tool_calls"][0] for chunk in chunks]
    assert calls[0]["function"]["name"] == "look"
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert arguments == whole["message"]["tool_calls"][0]["function"]["arguments"]
    assert whole["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_response_and_its_events(client: Client) -> None:
    body = {"input": "hi", "instructions": "be kind", "max_output_tokens": 6}
    whole = client.post("/v1/responses", body).json()
    assert whole["status"] == "incomplete" and whole["incomplete_details"] == {"reason": "max_output_tokens"}
    events = named_events(client.post("/v1/responses", {**body, "stream": True}).body)
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    pieces = [event["delta"] for name, event in events if name == "response.output_text.delta"]
    assert len(pieces) == 6 and "".join(pieces) == whole["output"][0]["content"][0]["text"]
    name, last = events[-1]
    assert name == "response.incomplete" and last["response"]["usage"]["output_tokens"] == 6
    assert last["response"]["output"][0]["content"] == whole["output"][0]["content"]


def test_a_conversation_in_items_is_the_same_chat(client: Client) -> None:
    """Text in parts, a call and its result are rendered as a chat's; the counts show it."""
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "sunny"},
    ]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [{"name": "look", "arguments": "{}"}]},
        {"role": "tool", "content": "sunny"},
    ]
    response = client.post("/v1/responses", {"input": items}).json()
    assert response["usage"]["input_tokens"] == client.post("/tokenize", {"messages": messages}).json()["count"]
    assert response["status"] == "completed"


def test_a_message_and_its_events(client: Client) -> None:
    whole = client.post("/v1/messages", MESSAGE).json()
    assert whole["stop_reason"] == "max_tokens" and whole["role"] == "assistant"
    events = named_events(client.post("/v1/messages", {**MESSAGE, "stream": True}).body)
    assert [name for name, _ in events if name != "content_block_delta"] == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    pieces = [event["delta"]["text"] for name, event in events if name == "content_block_delta"]
    assert len(pieces) == 6 and "".join(pieces) == whole["content"][0]["text"]
    usage = dict(events)["message_delta"]["usage"]
    counted = client.post("/v1/messages/count_tokens", {**MESSAGE}).json()["input_tokens"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted
    assert client.post("/v1/messages", {**MESSAGE, "max_tokens": 1000}).json()["stop_reason"] == "end_turn"


def test_embeddings_are_of_length_one_and_alike_in_both_encodings(client: Client) -> None:
    floats = client.post("/v1/embeddings", {"input": ["a", "b"], "dimensions": 5}).json()
    coded = client.post("/v1/embeddings", {"input": ["a", "b"], "dimensions": 5, "encoding_format": "base64"}).json()
    for number, each in zip(floats["data"], coded["data"], strict=True):
        read = struct.unpack("<5f", base64.b64decode(each["embedding"]))
        assert number["embedding"] == pytest.approx(read) and sum(x * x for x in read) == pytest.approx(1.0, abs=1e-5)
    assert floats["data"][0] != floats["data"][1] and floats["usage"] == {"prompt_tokens": 2, "total_tokens": 2}


FORM = (
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'
    b"\x00--b\r\n\xff\r\n"
    b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nmock-model\r\n--b--\r\n'
)


def test_a_transcription_says_what_arrived(client: Client) -> None:
    form = {"content-type": 'multipart/form-data; boundary="b"'}
    said = client.ask("POST", "/v1/audio/transcriptions", FORM, form).json()
    assert said["text"].startswith("a.wav: 7 bytes") and said["fields"] == {"model": "mock-model"}


@pytest.mark.parametrize(
    ("path", "body", "status", "word"),
    [
        ("/v1/chat/completions", {**CHAT, "tool_choice": "required"}, 400, "there are no `tools`"),
        ("/v1/chat/completions", {**CHAT, "tools": CHAT_TOOLS[:1], "tool_choice": GO}, 400, "known: look"),
        ("/v1/chat/completions", {**CHAT, "tools": [3], "tool_choice": "required"}, 400, "with a `name`"),
        ("/v1/responses", {"input": "hi", "previous_response_id": "r"}, 404, "nothing is stored"),
        ("/v1/responses", {"input": [{"type": "reasoning"}]}, 400, "`reasoning`"),
        ("/v1/responses", {"input": [{"content": [{"type": "input_file"}]}]}, 400, "`input_file`"),
        ("/v1/responses", {}, 400, "input"),
        ("/v1/messages", {**MESSAGE, "model": "none"}, 404, "none"),
        ("/v1/messages", {**MESSAGE, "max_tokens": None}, 400, "max_tokens"),
        (
            "/v1/messages",
            {**MESSAGE, "messages": [{"role": "user", "content": [{"type": "x"}]}]},
            400,
            "block_unknown",
        ),
        ("/v1/embeddings", {"input": []}, 400, "`input`"),
        ("/v1/embeddings", {"input": [4_000_000_000]}, 400, "vocabulary"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, 400, "`base64`"),
    ],
)
def test_what_cannot_be_served_is_said(client: Client, path: str, body: Any, status: int, word: str) -> None:
    answer = client.post(path, body)
    assert answer.status == status and word in answer.json()["error"]["message"]
    assert ("type" in answer.json()) is path.startswith("/v1/messages")


@pytest.mark.parametrize("form", [FORM[:-8], b"", FORM.replace(b'name="file"', b'name="sound"')])
def test_forms_that_are_none(client: Client, form: bytes) -> None:
    answer = client.ask("POST", "/v1/audio/transcriptions", form, {"content-type": "multipart/form-data; boundary=b"})
    assert answer.status == 400
