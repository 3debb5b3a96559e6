"""What is noted of a stream, what continues it, and how the next worker's stream is joined to it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvrelay.core.model.events import CanGoOn, CannotGoOn
from kvrelay.core.model.prompt import Usage
from kvrelay.edge.gateway.migration import StreamFollower, follow

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"


def body(**members: Any) -> bytes:
    return msgspec.json.encode({"model": "m", "stream": True, **members})


def event(*choices: dict[str, Any], id: str = "first", created: int = 1, **members: Any) -> bytes:
    head = {"id": id, "created": created, "model": "m"}
    return b"data: " + msgspec.json.encode({**head, "choices": list(choices), **members}) + b"\n\n"


def piece(text: str, ids: list[int] | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": more.pop("finish", None), "token_ids": ids}
    if "prompt_ids" in more:
        choice["prompt_token_ids"] = more.pop("prompt_ids")
    return event(choice, **more)


def said(content: str | None = None, role: str | None = None, finish: str | None = None, **more: Any) -> bytes:
    delta = {name: value for name, value in (("role", role), ("content", content)) if value is not None}
    return event({"index": 0, "delta": {**delta, **more.pop("delta", {})}, "finish_reason": finish}, **more)


def following(path: str = COMPLETIONS, **members: Any) -> StreamFollower:
    follower = follow(path, body(**members))
    assert follower is not None
    return follower


def next_body(follower: StreamFollower) -> dict[str, Any]:
    assert isinstance(follower.rest(), CanGoOn), follower.rest()
    found: dict[str, Any] = msgspec.json.decode(follower.continuation())
    return found


def test_only_streams_that_are_understood_are_followed() -> None:
    assert follow("/v1/responses", body()) is None
    assert follow(COMPLETIONS, b"[1, 2]") is None and follow(COMPLETIONS, b"{") is None


# --- what continues it -----------------------------------------------------------------------------------------------


def test_token_ids_are_continued_by_token_ids() -> None:
    follower = following(prompt=[1, 2, 3], max_tokens=10, min_tokens=6, temperature=0)
    for data in (piece("a", [7]), piece("bc", [8, 9])):
        assert follower.take(data) == data
    assert follower.rest() == CanGoOn(3)
    sent = next_body(follower)
    assert (sent["prompt"], sent["max_tokens"], sent["min_tokens"], sent["temperature"]) == (
        [1, 2, 3, 7, 8, 9],
        7,
        3,
        0,
    )


def test_a_text_is_continued_by_token_ids_where_the_worker_tells_those_of_the_prompt() -> None:
    follower = following(prompt="hello", max_tokens=10)
    follower.take(piece(" w", [7], prompt_ids=[1, 2]))
    follower.take(piece("orld", [8]))
    assert next_body(follower)["prompt"] == [1, 2, 7, 8]


def test_a_text_is_continued_by_text_where_ids_are_not_told() -> None:
    follower = following(prompt=["hello"], max_tokens=10)
    follower.take(piece(" w") + piece("orld"))
    sent = next_body(follower)
    assert (sent["prompt"], sent["max_tokens"]) == ("hello world", 8)


def test_a_chat_is_continued_by_an_open_assistant_message() -> None:
    messages = [{"role": "user", "content": "hi"}]
    follower = following(CHAT, messages=messages, max_completion_tokens=10)
    follower.take(said("", role="assistant") + said("he") + said("llo"))
    sent = next_body(follower)
    assert sent["messages"] == [*messages, {"role": "assistant", "content": "hello"}]
    assert (sent["continue_final_message"], sent["add_generation_prompt"]) == (True, False)
    assert sent["max_completion_tokens"] == 8 and "max_tokens" not in sent


def test_a_chat_that_continues_a_message_itself_goes_on_in_it() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I ", "name": "x"}]
    follower = following(CHAT, messages=messages, continue_final_message=True, add_generation_prompt=False)
    follower.take(said("am"))
    assert next_body(follower)["messages"] == [messages[0], {"role": "assistant", "content": "I am", "name": "x"}]


def test_before_the_first_text_the_request_is_sent_as_it_came() -> None:
    follower = following(CHAT, messages=[{"role": "user", "content": "hi"}])
    follower.take(said("", role="assistant"))
    assert follower.rest() == CanGoOn(0)
    assert next_body(follower) == msgspec.json.decode(body(messages=[{"role": "user", "content": "hi"}]))


def test_tokens_whose_text_was_held_back_are_generated_again() -> None:
    follower = following(prompt=[1], max_tokens=10)
    follower.take(piece("a", [7]) + piece("", [8]) + piece("", [9]))
    assert follower.rest() == CanGoOn(1)
    assert (next_body(follower)["prompt"], next_body(follower)["max_tokens"]) == ([1, 7], 9)


def test_with_stop_strings_only_the_text_is_known_to_be_with_the_client() -> None:
    follower = following(prompt="p", stop=["END"], max_tokens=10)
    follower.take(piece("a", [7], prompt_ids=[1]))
    assert next_body(follower)["prompt"] == "pa"


def test_a_completion_without_a_limit_has_the_engines_own() -> None:
    follower = following(prompt=[1])
    follower.take(piece("a", [7]))
    assert next_body(follower)["max_tokens"] == 15


@pytest.mark.parametrize(
    ("members", "because"),
    [
        ({"n": 2}, "several_choices"),
        ({"best_of": 3}, "several_choices"),
        ({"use_beam_search": True}, "several_choices"),
        ({"logprobs": 0}, "logprobs"),
        ({"prompt_logprobs": 1}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"functions": [{}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "structured_output"),
        ({"guided_regex": "a+"}, "structured_output"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_output"),
        ({"frequency_penalty": 0.5}, "penalties"),
        ({"presence_penalty": -1}, "penalties"),
        ({"kv_transfer_params": {}}, "kv_transfer"),
        ({"stream_options": {"continuous_usage_stats": True}}, "continuous_usage"),
        ({"prompt": [[1], [2]]}, "several_prompts"),
        ({"prompt": ["a", "b"]}, "several_prompts"),
        ({"prompt": {"odd": 1}}, "prompt_shape_unknown"),
        ({"max_tokens": 1}, "nothing_left"),
    ],
)
def test_what_nobody_else_could_continue_unseen_is_not_continued(members: dict[str, Any], because: str) -> None:
    follower = following(**{"prompt": [1], "max_tokens": 5, **members})
    follower.take(piece("a", [7]))
    assert follower.rest() == CannotGoOn(because)


def test_harmless_values_of_these_members_are_no_hindrance() -> None:
    harmless = {"n": 1, "logprobs": None, "echo": False, "tools": [], "response_format": {"type": "text"}}
    follower = following(prompt=[1], max_tokens=5, presence_penalty=0, stop=None, **harmless)
    follower.take(piece("a", [7]))
    assert follower.rest() == CanGoOn(1)
    unused = following(CHAT, messages=[], tools=[{"type": "function"}], tool_choice="none")
    unused.take(said("a"))
    assert unused.rest() == CanGoOn(1)


@pytest.mark.parametrize(
    ("data", "because"),
    [
        (said(delta={"tool_calls": [{}]}), "tools"),
        (said(delta={"reasoning_content": "hm"}), "reasoning"),
        (event({"index": 1, "delta": {"content": "x"}}), "several_choices"),
        (said("x", finish="stop"), "nothing_left"),
        (b"data: {broken\n\n", "not_understood"),
    ],
)
def test_what_the_stream_itself_shows_can_be_in_the_way_as_well(data: bytes, because: str) -> None:
    follower = following(CHAT, messages=[{"role": "user", "content": "hi"}])
    assert follower.take(data) == data
    assert follower.rest() == CannotGoOn(because)


def test_token_ids_that_nobody_told_cannot_be_continued() -> None:
    follower = following(prompt=[1, 2], max_tokens=5)
    follower.take(piece("a"))
    assert follower.rest() == CannotGoOn("token_ids_unknown")


def test_a_limit_that_only_the_worker_knows_is_not_guessed() -> None:
    follower = following(prompt="p")
    follower.take(piece("a"))
    assert follower.rest() == CannotGoOn("limit_unknown")


# --- what the client sees --------------------------------------------------------------------------------------------


def test_only_whole_events_pass_however_the_network_cuts_them() -> None:
    follower = following(prompt=[1])
    stream = b": hello\n\n" + piece("a", [7]) + piece("b", [8], finish="length").replace(b"\n\n", b"\r\n\r\n") + DONE
    passed = [follower.take(stream[at : at + 5]) for at in range(0, len(stream), 5)]
    assert b"".join(passed) == stream and follower.ended
    assert all(not each or each.endswith((b"\n\n", b"\r\n\r\n")) for each in passed)


def test_half_an_event_of_a_lost_worker_is_dropped() -> None:
    follower = following(prompt=[1], max_tokens=5)
    assert follower.take(piece("a", [7]) + piece("b", [8])[:20]) == piece("a", [7])
    assert next_body(follower)["prompt"] == [1, 7]
    follower.begin(continues=True)
    assert follower.take(piece("b", [8])) == piece("b", [8])


def test_the_question_for_ids_does_not_show() -> None:
    follower = following(prompt="p", max_tokens=5)
    asked = msgspec.json.decode(follower.asking(body(prompt="p"), shows_ids=True))
    assert asked["return_token_ids"] is True
    quoted = 'say "token_ids":[1]'
    shown = follower.take(piece(quoted, [7, 8], prompt_ids=[1, 2]))
    assert shown == piece(quoted, None, prompt_ids=None)
    assert next_body(follower)["prompt"] == [1, 2, 7, 8]


def test_an_event_that_only_the_question_has_brought_is_taken_out() -> None:
    follower = following(CHAT, messages=[{"role": "user", "content": "hi"}])
    follower.asking(body(), shows_ids=True)
    silent = event({"index": 0, "delta": {}, "finish_reason": None, "token_ids": [5]})
    assert follower.take(silent) == b""
    assert follower.take(event(usage={"prompt_tokens": 1})) != b""


def test_a_client_that_asks_for_ids_itself_keeps_them() -> None:
    follower = following(prompt=[1], return_token_ids=True, max_tokens=5)
    assert follower.asking(b"{}", shows_ids=True) == b"{}"
    assert follower.take(piece("a", [7], prompt_ids=[1])) == piece("a", [7], prompt_ids=[1])
    follower.begin(continues=True)
    assert follower.take(piece("b", [8], prompt_ids=[1, 7])) == piece("b", [8], prompt_ids=None)


def test_the_next_workers_stream_is_joined_unseen() -> None:
    follower = following(CHAT, messages=[{"role": "user", "content": "hi"}], max_tokens=9)
    shown = follower.take(said("", role="assistant") + said("one "))
    follower.begin(continues=True)
    later = {"id": "second", "created": 99}
    shown += follower.take(said("", role="assistant", **later) + said("two", finish="stop", **later))
    counts = {"prompt_tokens": 11, "completion_tokens": 1, "total_tokens": 12, "prompt_tokens_details": None}
    shown += follower.take(event(usage=counts, **later) + DONE)
    whole = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12, "prompt_tokens_details": None}
    assert shown == (said("", role="assistant") + said("one ") + said("two", finish="stop") + event(usage=whole) + DONE)
    assert follower.ended
    assert follower.usage(Usage(11, 1, 8)) == Usage(10, 2, 8)


def test_a_role_that_comes_with_text_is_taken_out_of_it() -> None:
    follower = following(CHAT, messages=[{"role": "user", "content": "hi"}])
    follower.take(said("one ", role="assistant"))
    follower.begin(continues=True)
    assert follower.take(said("two", role="assistant")) == said("two")


def test_a_role_that_the_client_has_not_heard_yet_passes() -> None:
    follower = following(CHAT, messages=[{"role": "user", "content": "hi"}])
    follower.take(b": still there\n\n")
    follower.begin(continues=True)
    assert follower.take(said("", role="assistant")) == said("", role="assistant")


def test_counts_of_an_undisturbed_stream_are_the_workers_own() -> None:
    assert following(prompt=[1]).usage(Usage(5, 3, 2)) == Usage(5, 3, 2)


def test_cached_tokens_are_never_more_than_the_prompt() -> None:
    follower = following(prompt="p", max_tokens=9)
    follower.take(piece("a", [7], prompt_ids=[1, 2, 3]))
    follower.begin(continues=True)
    assert follower.usage(Usage(4, 2, 4)) == Usage(3, 3, 3)


def test_only_an_answer_that_was_said_to_its_end_is_closed() -> None:
    follower = following(prompt="p", max_tokens=3)
    follower.take(piece("a", [7]))
    assert follower.closing() is None
    follower.take(piece("b", [8, 9], finish="length"))
    assert follower.closing() == DONE and follower.usage(Usage()) == Usage(None, 3, None)


@pytest.mark.parametrize(("path", "kind"), [(COMPLETIONS, "text_completion"), (CHAT, "chat.completion.chunk")])
def test_counts_that_were_asked_for_are_said_where_the_stream_showed_them(path: str, kind: str) -> None:
    follower = following(path, prompt="p", messages=[], stream_options={"include_usage": True})
    choice = {"index": 0, "finish_reason": "stop", "token_ids": [7, 8], "prompt_token_ids": [1, 2, 3]}
    follower.take(event(choice | ({"text": "a"} if path == COMPLETIONS else {"delta": {"content": "a"}})))
    closing = follower.closing()
    assert closing is not None and closing.endswith(b"\n\n" + DONE)
    said_last = msgspec.json.decode(closing.removesuffix(b"\n\n" + DONE).removeprefix(b"data: "))
    counts = {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2}
    assert said_last == {"object": kind, "id": "first", "created": 1, "model": "m", "choices": [], "usage": counts}
    follower.take(event(usage=counts))
    assert follower.closing() == DONE


def test_a_stream_is_not_closed_whose_counts_or_other_choices_are_not_known() -> None:
    asked = following(prompt="p", stream_options={"include_usage": True})
    asked.take(piece("a", [7], finish="stop"))
    several = following(prompt="p", n=2)
    several.take(piece("a", [7], finish="stop"))
    assert asked.closing() is None and several.closing() is None


@pytest.mark.parametrize(
    "data",
    [
        b'data: {"error": {"message": "engine is dead", "code": 500}}\n\n' + DONE,
        b'data: {"error": "engine is dead"}\n\n' + DONE,
        said(finish="abort") + DONE,
    ],
)
def test_a_failure_that_a_worker_tells_in_its_stream_does_not_pass(data: bytes) -> None:
    follower = following(CHAT, messages=[{"role": "user", "content": "hi"}])
    assert follower.take(said("a") + data) == said("a")
    assert follower.failed is not None and not follower.ended and follower.rest() == CanGoOn(1)


def test_a_mistake_of_the_client_that_is_told_in_the_stream_passes() -> None:
    follower = following(prompt=[10**6])
    data = b'data: {"error": {"message": "out of vocabulary", "code": 400}}\n\n' + DONE
    assert follower.take(data) == data and follower.ended and follower.failed is None


def test_an_event_without_end_is_not_collected() -> None:
    follower = following(prompt=[1])
    flood = b"data: " + b"x" * 2**21
    assert follower.take(flood) == flood and follower.take(b"more") == b"more"
    assert follower.rest() == CannotGoOn("event_too_long")
