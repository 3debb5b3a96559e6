"""Anthropic's messages as a chat. The expected chats are what vLLM 0.32 makes of these requests."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvrelay.edge.tokens.messages import CannotConvert, as_chat

REFERENCE = {"type": "tool_result", "content": [{"type": "tool_reference"}]}
USER: dict[str, Any] = {"role": "user", "content": "q"}


def chat_of(**body: Any) -> dict[str, Any]:
    return as_chat(msgspec.json.encode({"model": "m", "max_tokens": 5, "messages": [USER], **body}))


def messages_of(*turns: dict[str, Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = chat_of(messages=turns)["messages"]
    return messages


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


@pytest.mark.covers("S20")
def test_a_conversation_with_tools() -> None:
    tool_use = {"type": "tool_use", "id": "tu1", "name": "look", "input": {"b": 1, "a": "ü"}}
    result = {"type": "tool_result", "tool_use_id": "tu1", "content": [text("x"), text("y")]}
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    assert messages_of(
        {"role": "user", "content": [text("q", cache_control={"type": "ephemeral"})]},
        {"role": "assistant", "content": [thought, text("t"), tool_use]},
        {"role": "user", "content": [result, text("p1"), text("p2")]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "tu2", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "tu2", "content": "z"}]},
    ) == [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": "t",
            "reasoning": "hm",
            "tool_calls": [
                {
                    "id": "tu1",
                    "type": "function",
                    "function": {"name": "look", "arguments": '{"b": 1, "a": "\\u00fc"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "tu1", "content": "x\ny"},
        {"role": "user", "content": [text("p1"), text("p2")]},
        {
            "role": "assistant",
            "tool_calls": [{"id": "tu2", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "tu2", "content": "z"},
    ]


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("Be kind.", "Be kind."),
        ([text("a"), text("b")], "ab"),
        ([text("x-anthropic-billing-header: cch=1;"), text("b")], "b"),
        ("", None),
        ([], None),
        (None, None),
    ],
)
def test_the_system_prompt_comes_first(system: Any, expected: str | None) -> None:
    first = [] if expected is None else [{"role": "system", "content": expected}]
    assert chat_of(system=system)["messages"] == [*first, USER]


def test_tools_get_the_shape_of_functions() -> None:
    schema = {"properties": {"where": {"type": "string"}}}
    tools = [
        {"name": "look", "description": "d", "input_schema": schema, "cache_control": {"type": "ephemeral"}},
        {"name": "go", "input_schema": {"type": "object"}, "strict": True},
    ]
    assert chat_of(tools=tools)["tools"] == [
        {
            "type": "function",
            "function": {"name": "look", "description": "d", "parameters": {**schema, "type": "object"}},
        },
        {
            "type": "function",
            "function": {"name": "go", "description": None, "parameters": {"type": "object"}, "strict": True},
        },
    ]
    assert "tools" not in chat_of()


def test_what_is_empty_or_for_anthropics_servers_only_is_left_out() -> None:
    redacted = {"type": "redacted_thinking", "data": "x"}
    assert messages_of({"role": "user", "content": [text("")]}, USER) == [USER]
    assert messages_of(USER, {"role": "assistant", "content": [redacted, text("t")]})[1] == {
        "role": "assistant",
        "content": "t",
    }
    assert chat_of(thinking={"type": "enabled", "budget_tokens": 2000}, temperature=0.5) == {"messages": [USER]}


@pytest.mark.parametrize(
    ("body", "because"),
    [
        ({"thinking": {"type": "disabled"}}, "reasoning_effort"),
        ({"output_config": {"effort": "low"}}, "reasoning_effort"),
        ({"messages": [USER, {"role": "system", "content": "s"}]}, "inline_system"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "content_block_unknown"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_result"}]}]}, "tool_result_of_assistant"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "tool_use_without_id"),
        ({"messages": [{"role": "user", "content": [REFERENCE]}]}, "tool_reference"),
    ],
)
def test_what_depends_on_more_than_the_request_is_not_guessed(body: dict[str, Any], because: str) -> None:
    with pytest.raises(CannotConvert, match=f"^{because}$"):
        chat_of(**body)


@pytest.mark.parametrize(
    "body", [{"messages": "q"}, {"messages": [{"role": "user"}]}, {"tools": [{"type": "web_search"}]}]
)
def test_shapes_that_are_none(body: dict[str, Any]) -> None:
    with pytest.raises(msgspec.DecodeError):
        chat_of(**body)
