"""Token counts as engines put them into answers."""

from __future__ import annotations

import pytest

from kvrelay.core.model.prompt import Usage
from kvrelay.edge.connectors.usage import usage_from_body, usage_from_sse

COUNTED = b'{"id":"x","choices":[],"usage":{"prompt_tokens":100,"completion_tokens":5,"prompt_tokens_details":%s}}'


@pytest.mark.covers("RC-09")
def test_cached_tokens_come_from_the_engine() -> None:
    assert usage_from_body(COUNTED % b'{"cached_tokens":64}') == Usage(100, 5, 64)


@pytest.mark.parametrize("details", [b"null", b"{}", b'{"cached_tokens":null}'])
def test_cached_tokens_that_were_not_said_are_unknown(details: bytes) -> None:
    assert usage_from_body(COUNTED % details) == Usage(100, 5, None)


@pytest.mark.parametrize("body", [b"", b"{}", b'{"usage":null}', b"<html>", b'{"usage":"many"}', b'{"error":{}}'])
def test_answers_without_counts(body: bytes) -> None:
    assert usage_from_body(body) == Usage()


def test_the_last_chunk_of_a_stream() -> None:
    tail = (
        b'"text":"cut in the middle"}\n\n'
        b'data: {"choices":[{"text":"a"}],"usage":null}\n\n'
        b"data: " + COUNTED % b'{"cached_tokens":64}' + b"\n\ndata: [DONE]\n\n"
    )
    assert usage_from_sse(tail) == Usage(100, 5, 64)


def test_line_ends_of_either_kind_and_no_space_after_data() -> None:
    assert usage_from_sse(b"data:" + COUNTED % b"null" + b"\r\n\r\ndata: [DONE]\r\n\r\n") == Usage(100, 5, None)


def test_text_that_speaks_of_usage_is_not_usage() -> None:
    tail = b'data: {"choices":[{"text":"\\"usage\\": {\\"prompt_tokens\\": 9}"}]}\n\ndata: [DONE]\n\n'
    assert usage_from_sse(tail) == Usage()


@pytest.mark.parametrize("tail", [b"", b"data: [DONE]\n\n", b'ge":{"prompt_tokens":1}}\n\n', b'data: {"usage":'])
def test_streams_without_counts(tail: bytes) -> None:
    assert usage_from_sse(tail) == Usage()


RESPONSES = b'{"input_tokens":100,"output_tokens":5,"input_tokens_details":{"cached_tokens":64},"total_tokens":105}'
MESSAGES = b'{"input_tokens":30,"output_tokens":5,"cache_read_input_tokens":64,"cache_creation_input_tokens":6}'


@pytest.mark.parametrize("counts", [RESPONSES, MESSAGES])
def test_the_words_of_other_apis(counts: bytes) -> None:
    assert usage_from_body(b'{"usage":%b}' % counts) == Usage(100, 5, 64)


def test_messages_without_cache_counts_leave_what_was_cached_unknown() -> None:
    assert usage_from_body(b'{"usage":{"input_tokens":100,"output_tokens":5}}') == Usage(100, 5, None)


def test_streams_of_other_apis() -> None:
    created = b'event: response.created\ndata: {"response":{"usage":null}}\n\n'
    completed = b'event: response.completed\ndata: {"response":{"usage":%b}}\n\n' % RESPONSES
    assert usage_from_sse(created + completed) == Usage(100, 5, 64)
    ended = b'event: message_delta\ndata: {"delta":{"stop_reason":"end_turn"},"usage":%b}\n\n' % MESSAGES
    stopped = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    assert usage_from_sse(ended + stopped) == Usage(100, 5, 64)
    assert usage_from_sse(created) == Usage()
