"""Calls of tools: always the tool that was asked for, its first argument being the text that the engine makes.

A call is always whole, also where the token limit ended it.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from kvrelay.edge.worker.answers import RequestError

DEFAULT_ARGUMENT = "text"


class ToolCall(Struct, frozen=True):
    """`argument` names the member of the arguments object that gets the text."""

    name: str
    argument: str

    @property
    def before(self) -> str:
        """The JSON before the text; after it comes `AFTER`."""
        return "{" + msgspec.json.encode(self.argument).decode() + ': "'


AFTER = '"}'


def forced_call(tools: list[Any] | None, *, named: str | None, required: bool) -> ToolCall | None:
    """The call that must be made; None when the model is free to answer in words, as the mock then does.

    `tools` are objects with `name` and `parameters` (or `input_schema`), or such an object in `function`.
    """
    if named is None and not required:
        return None
    if not tools:
        raise RequestError(400, "`tool_choice` asks for a call, but there are no `tools`", param="tool_choice")
    functions = [_function(tool) for tool in tools]
    chosen = functions[0] if named is None else next((each for each in functions if each["name"] == named), None)
    if chosen is None:
        known = ", ".join(each["name"] for each in functions)
        raise RequestError(400, f"no tool is named `{named}`; known: {known}", param="tool_choice")
    return ToolCall(chosen["name"], _first_argument(chosen.get("parameters", chosen.get("input_schema"))))


def _function(tool: Any) -> dict[str, Any]:
    if isinstance(tool, dict):
        function = tool.get("function", tool)
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return function
    raise RequestError(400, "a tool must be an object with a `name`", param="tools")


def _first_argument(schema: Any) -> str:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return next(iter(properties)) if isinstance(properties, dict) and properties else DEFAULT_ARGUMENT
