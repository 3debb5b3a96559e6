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
