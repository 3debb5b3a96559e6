"""The first thing in two requests that a template writes differently."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.edge.tokens.request_difference import Difference, first_difference


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def body(*tools: dict[str, Any], content: Any = "hello", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "tools": list(tools), **more}


@pytest.mark.covers("CC-12")
@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (body(tool("a"), tool("b")), body(tool("b"), tool("a")), Difference("tools", "order", ["a", "b"], ["b", "a"])),
        (body(tool("a", type="object", required=["x"])), body(tool("a", required=["x"], type="object")),
         Difference("tools[0].function.parameters", "member_order", ["type", "required"], ["required", "type"])),
        (body(tool("a", type="object")), body(tool("a", type="string")),
         Difference("tools[0].function.parameters.type", "value", "object", "string")),
        (body(tool("a")), body(tool("a"), tool("b")), Difference("tools[1]", "only_right", None, {
            "type": "function", "function": {"name": "b", "description": None, "parameters": {}}})),
        (body(tool("a", x=1, y=2)), body(tool("a", x=1)),
         Difference("tools[0].function.parameters.y", "only_left", 2, None)),
        (body(content="Mo"), body(content="Tu"), Difference("messages[0].content", "value", "Mo", "Tu")),
        (body(), body(chat_template_kwargs={"enable_thinking": False}),
         Difference("chat_template_kwargs", "only_right", None, {"enable_thinking": False})),
        ({"prompt": "a"}, {"prompt": "b"}, Difference("prompt", "value", "a", "b")),
    ],
)  # fmt: skip
def test_it_is_named_with_its_place_and_kind(left: Any, right: Any, expected: Difference) -> None:
    assert first_difference(left, right) == expected


@pytest.mark.covers("CC-12")
def test_tools_come_before_messages_as_templates_write_them() -> None:
    found = first_difference(body(tool("a"), tool("b"), content="x"), body(tool("b"), tool("a"), content="y"))
    assert found is not None and found.path == "tools"


def test_what_the_engine_puts_into_one_shape_is_no_difference() -> None:
    function = {"parameters": {}, "name": "a"}
    assert first_difference(body(tool("a")), body({"function": function, "type": "function"})) is None
    assert first_difference(body(content="hello"), body(content=[{"type": "text", "text": "hello"}])) is None
    assert first_difference(body(temperature=0), body(temperature=1)) is None  # no part of the prompt


def test_shapes_that_no_template_takes_are_compared_as_they_are() -> None:
    left, right = {"messages": [3]}, {"messages": [4]}
    assert first_difference(left, right) == Difference("messages[0]", "value", 3, 4)
