"""Counts that the client did not ask for: the question in the body, and the event that must not be seen."""

from __future__ import annotations

import json
import random

import pytest

from kvrelay.edge.gateway.openai import read_body
from kvrelay.edge.gateway.unasked_usage import MAX_HELD_BYTES, UsageFilter, asking, editable, speaks_of_question

PATH = "/v1/completions"
COUNTS = b'{"prompt_tokens":3,"total_tokens":5,"completion_tokens":2}'
TOKEN = b'data: {"choices":[{"index":0,"text":"a"}],"usage":null}\n\n'
USAGE = b'data: {"id":"x","choices":[],"usage":' + COUNTS + b"}\n\n"
DONE = b"data: [DONE]\n\n"


def edited(body: bytes) -> bytes | None:
    said = read_body(PATH, body)
    return asking(body, said.stream_options) if said.hides_usage else None


@pytest.mark.covers("S30")
@pytest.mark.parametrize(
    ("body", "asked"),
    [
        (b'{"stream":true}', b'{"stream":true,"stream_options":{"include_usage":true}}'),
        (
            b' {"prompt":"}", "x":1.50,\n"stream" : true }\r\n ',
            b' {"prompt":"}", "x":1.50,\n"stream" : true ,"stream_options":{"include_usage":true}}\r\n ',
        ),
        (b'{"stream":true,"stream_options":null}', b'{"stream":true,"stream_options":{"include_usage":true}}'),
        (
            b'{"stream_options" : { "include_usage":false } , "stream":true}',
            b'{"stream_options" : {"include_usage":true} , "stream":true}',
        ),
        (
            b'{"stream":true,"stream_options":{"continuous_usage_stats":true,"include_usage":false},"n":1}',
            b'{"stream":true,"stream_options":{"include_usage":true},"n":1}',
        ),
        (
            b'{"tools":[{"stream_options":null,"name":"stream_options"}],"stream":true,"stream_options":null}',
            b'{"tools":[{"stream_options":null,"name":"stream_options"}],"stream":true,"stream_options":{"include_usage":true}}',
        ),
    ],
)
def test_the_question_is_put_into_the_text_and_nothing_else_moves(body: bytes, asked: bytes) -> None:
    assert edited(body) == asked
    assert json.loads(asked)["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    "body",
    [
        b'{"stream":false}',
        b'{"prompt":"stream"}',
        b'{"stream":1}',
        b'{"stream":true,"stream_options":{"include_usage":true}}',
        b'{"stream":true,"stream_options":{}}',  # engines differ in what this means
        b'{"stream":true,"stream_options":{"include_usage":null}}',
        b'{"stream":true,"stream_options":{"include_usage":0}}',
        b'{"stream":true,"stream_options":{"include_usage":false,"other":1}}',
        b'{"stream":true,"stream_options":"no"}',
        b'{"stream":true,"stream\\u005foptions":null}',
        b'{"stream":true,"stream_options":null,"stream_options":{"include_usage":false}}',
        b'{"stream":true,"stream\\u005foptions":null,"tools":[{"stream_options":null}]}',
        b'[{"stream":true}]',
        b"",
    ],
)
def test_what_asks_already_or_is_not_certain_is_left_alone(body: bytes) -> None:
    assert edited(body) is None


def test_a_text_that_looks_like_the_member_does_not_mislead() -> None:
    text = json.dumps('"stream_options":{"include_usage":false}').encode()
    body = b'{"prompt":%b,"stream":true,"stream_options":{"include_usage":false}}' % text
    asked = edited(body)
    assert asked is None or json.loads(asked) == {**json.loads(body), "stream_options": {"include_usage": True}}
    plain = b'{"prompt":%b,"stream":true}' % text
    asked = edited(plain)
    assert asked is not None
    assert json.loads(asked) == {**json.loads(plain), "stream_options": {"include_usage": True}}


def test_other_paths_are_not_asked() -> None:
    assert not read_body("/v1/responses", b'{"stream":true}').hides_usage


def relayed(pieces: list[bytes]) -> tuple[bytes, bytes]:
    usage = UsageFilter()
    return b"".join([usage.take(piece) for piece in pieces] + [usage.rest()]), usage.usage_event


@pytest.mark.covers("S30")
@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_the_event_with_counts_is_gone_wherever_the_network_cuts_the_stream(end: bytes) -> None:
    direct = (TOKEN * 2 + b": ping\n\n" + DONE).replace(b"\n\n", end)
    whole = (TOKEN * 2 + b": ping\n\n" + USAGE + DONE).replace(b"\n\n", end)
    for cut in range(len(whole) + 1):
        assert relayed([whole[:cut], whole[cut:]]) == (direct, USAGE.replace(b"\n\n", end)), cut
    chance = random.Random(30)
    for _ in range(300):
        cuts = sorted(chance.randrange(len(whole)) for _ in range(chance.randrange(12)))
        pieces = [whole[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
        assert relayed(pieces) == (direct, USAGE.replace(b"\n\n", end)), cuts


@pytest.mark.parametrize(
    "event",
    [
        TOKEN,
        b'data: {"choices":[],"usage":null}\n\n',
        b'data: {"choices":[{"text":"a"}],"usage":{"prompt_tokens":3}}\n\n',
        b'data: {"choices":[{"text":"\\"usage\\":{\\"prompt_tokens\\":3}"}]}\n\n',
        b'data: {"error":{"message":"no","prompt_tokens":3}}\n\n',
        b'data: "prompt_tokens"\n\n',
        b'data: {"usage":{"prompt_tokens":3}}\n\n',
        b'event: x\ndata: {"choices":[],"usage":{"prompt_tokens":3}}\n\n',
        b"data: {\xff}\n\n",
        b"\n\n\n\n",
        b"data: [DONE]",
    ],
)
def test_every_other_event_passes_as_it_is(event: bytes) -> None:
    assert relayed([event])[0] == event
    assert relayed([event[:7], event[7:]])[0] == event
    assert relayed([event + USAGE, DONE])[0] == event + (USAGE if not event.endswith(b"\n\n") else b"") + DONE


def test_whole_events_pass_at_once_and_a_very_long_one_does_not_fill_memory() -> None:
    usage = UsageFilter()
    assert usage.take(TOKEN) is TOKEN
    assert usage.take(TOKEN + TOKEN[:9]) == TOKEN
    assert usage.take(TOKEN[9:]) == TOKEN
    long = b'data: {"choices":[{"text":"' + b"x" * (2 * MAX_HELD_BYTES)
    assert usage.take(long) == long
    assert usage.take(b'"}]}\n\n' + USAGE + DONE) == b'"}]}\n\n' + DONE


def test_counts_without_an_end_are_taken_out_too() -> None:
    assert relayed([TOKEN + USAGE.rstrip()]) == (TOKEN, USAGE.rstrip())


def test_what_cannot_be_edited_and_what_speaks_of_the_question_is_told() -> None:
    assert editable([(b"Content-Type", b"text/event-stream"), (b"Content-Encoding", b"identity")])
    assert not editable([(b"Content-Encoding", b"gzip")])
    assert not editable([(b"content-length", b"7")])
    assert speaks_of_question(b"unknown field `stream_options`") and not speaks_of_question(b"no such model")
