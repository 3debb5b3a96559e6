"""The first token in a stream, however it comes."""

from __future__ import annotations

import pytest

from kvrelay.edge.gateway.stream import MAX_GAPS, StreamWatch

ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"choices":[{"text":"a"}]}\n\n',
        b'data: {"choices":[{"text": "\\"quoted"}]}\n\n',
        b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
        b'data: {"choices":[{"delta":{"reasoning_content":"a"}}]}\n\n',
        b'data: {"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}\n\n',
        b'data: {"choices":[{"token_ids":[5]}]}\n\n',
        b'data: {"type":"response.output_text.delta","delta":"a"}\n\n',
        b'data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"a"}}\n\n',
        b'data: {"type":"content_block_delta","delta":{"type":"thinking_delta","thinking":"a"}}\n\n',
        b'data: {"type":"content_block_delta","delta":{"type":"input_json_delta","partial_json":"{"}}\n\n',
    ],
)
def test_the_first_event_with_output_is_the_first_token(event: bytes) -> None:
    watch = StreamWatch()
    assert not watch.take(ROLE, 1.0)
    assert watch.take(event, 2.0)
    assert not watch.take(event, 3.5)
    assert watch.gaps_ms == [1500.0]


@pytest.mark.parametrize(
    "event",
    [
        ROLE,
        b": comment\n\n",
        b'data: {"choices":[{"delta":{"tool_calls":[]}}]}\n\n',
        b'data: {"choices":[{"text":"","prompt_token_ids":[1,2]}]}\n\n',
        b'data: {"error":{"message":"no"}}\n\n',
        b'data: {"type":"content_block_start","content_block":{"type":"text","text":""}}\n\n',
        b"data: [DONE]\n\n",
    ],
)
def test_events_without_output_are_no_token(event: bytes) -> None:
    assert not StreamWatch().take(event, 1.0)


def test_a_token_cut_in_two_by_the_network_is_seen() -> None:
    whole = b'data: {"choices":[{"text":"a"}]}\n\n'
    for cut in range(1, len(whole)):
        watch = StreamWatch()
        assert watch.take(whole[:cut], 1.0) + watch.take(whole[cut:], 2.0) == 1, cut


def test_gaps_and_tail_are_bounded() -> None:
    watch = StreamWatch()
    for number in range(5000):
        watch.take(b'data: {"text":"%d"}\n\n' % number + b"x" * 10_000, float(number))
    assert len(watch.gaps_ms) == MAX_GAPS
    assert len(watch.tail()) <= 64 * 1024 and watch.tail().endswith(b"x")


@pytest.mark.parametrize(
    "event",
    [
        b"data: [DONE]\n\n",
        b"data:[DONE]\r\n\r\n",
        b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
        b'event: response.completed\ndata: {"type":"response.completed","response":{"output":[]}}\n\n',
    ],
)
@pytest.mark.parametrize("cut", [0, 3])
def test_the_last_event_completes_a_stream_before_its_body_ends(event: bytes, cut: int) -> None:
    watch = StreamWatch()
    watch.take(b'data: {"choices":[{"text":"a"}]}\n\n' + event[:cut], 1.0)
    assert not watch.is_complete()
    watch.take(event[cut:], 2.0)
    assert watch.is_complete()


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"choices":[{"text":"data: [DONE]"}]}\n\n',
        b'data: {"choices":[{"text":"\\n\\ndata: [DONE]\\n\\n"}]}\n\n',
        b"data: [DONE]",
        b"data: [DONE]\n",
        b'event: response.output_text.done\ndata: {"text":"event: message_stop"}\n\n',
        b"event: message_stop\n\n",
    ],
)
def test_what_only_speaks_of_the_end_completes_nothing(event: bytes) -> None:
    watch = StreamWatch()
    watch.take(event, 1.0)
    assert not watch.is_complete()
