"""A request in the words of Anthropic's Messages API as the chat that vLLM makes of it, before its template is applied.

Cuts what only Anthropic's servers understand, as the engine does: signatures, cache marks, redacted thoughts, and the
head line of Claude Code that differs from request to request.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
from msgspec import Raw, Struct

MEMBERS = ("messages", "system", "tools", "chat_template_kwargs", "thinking", "output_config")
_BLOCKS = frozenset(("text", "image", "tool_use", "tool_result", "tool_reference", "thinking", "redacted_thinking"))
_BILLING = "x-anthropic-billing-header"


class CannotConvert(Exception):
    """The prompt depends on more than the request; the text says on what."""


class _Block(Struct):
    """A block of content, of any type."""

    type: str
    text: str | None = None
    source: dict[str, Any] | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[dict[str, Any]] | None = None


class _Turn(Struct):
    role: str
    content: str | list[_Block]


class _Tool(Struct):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class _Thinking(Struct):
    type: str


class _OutputConfig(Struct):
    effort: str | None = None


class _Body(Struct):
    messages: list[_Turn]
    system: str | list[_Block] | None = None
    tools: list[_Tool] | None = None
    chat_template_kwargs: Raw | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None


_decode = msgspec.json.Decoder(_Body).decode


def as_chat(body: bytes) -> dict[str, Any]:
    """`messages`, and `tools` and `chat_template_kwargs` where there are any, by the names of a chat request.

    Raises one of `UNREADABLE`, or CannotConvert.
    """
    received = _decode(body)
    if received.output_config is not None and received.output_config.effort is not None:
        raise CannotConvert("reasoning_effort")
    if received.thinking is not None and received.thinking.type == "disabled":
        raise CannotConvert("reasoning_effort")  # the engine tries out which effort the template knows
    chat: dict[str, Any] = {"messages": [*_system(received.system)]}
    for turn in received.messages:
        chat["messages"] += _turn(turn)
    if received.tools is not None:
        chat["tools"] = [_tool(tool) for tool in received.tools]
    if received.chat_template_kwargs is not None:
        chat["chat_template_kwargs"] = received.chat_template_kwargs
    return chat


def _system(received: str | list[_Block] | None) -> list[dict[str, Any]]:
    if isinstance(received, list):
        texts = [block.text for block in received if block.type == "text" and block.text]
        received = "".join(text for text in texts if not text.startswith(_BILLING))
    return [{"role": "system", "content": received}] if received else []


def _turn(turn: _Turn) -> list[dict[str, Any]]:
    """What tools brought becomes messages of its own, before the rest of the turn."""
    if turn.role == "system":
        raise CannotConvert("inline_system")  # where it goes is up to the engine's template
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    if any(block.type not in _BLOCKS for block in turn.content):
        raise CannotConvert("content_block_unknown")
    results = [block for block in turn.content if block.type == "tool_result"]
    if turn.role != "user" and results:
        raise CannotConvert("tool_result_of_assistant")
    said = _said(turn.role, turn.content)
    messages = [message for block in results for message in _result(block)]
    return messages if turn.role == "user" and "content" not in said else [*messages, said]


def _said(role: str, blocks: list[_Block]) -> dict[str, Any]:
    said: dict[str, Any] = {"role": role}
    parts = [part for block in blocks if (part := _part(block)) is not None]
    calls = [_call(block) for block in blocks if block.type == "tool_use"]
    thoughts = [block.thinking for block in blocks if block.type == "thinking" and block.thinking is not None]
    if thoughts:
        said["reasoning"] = "".join(thoughts)
    if calls:
        said["tool_calls"] = calls
    if len(parts) == 1 and parts[0]["type"] == "text":
        said["content"] = parts[0]["text"]
    elif parts:
        said["content"] = parts
    return said


def _part(block: _Block) -> dict[str, Any] | None:
    if block.type == "text" and block.text:
        return {"type": "text", "text": block.text}
    if block.type == "image" and block.source:
        return _image(block.source)
    return None


def _image(source: dict[str, Any]) -> dict[str, Any]:
    if source.get("type") == "url":
        url = source.get("url", "")
    else:
        url = f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _call(block: _Block) -> dict[str, Any]:
    if block.id is None:
        raise CannotConvert("tool_use_without_id")  # the engine makes one of the time
    function = {"name": block.name or "", "arguments": json.dumps(block.input or {})}
    return {"id": block.id, "type": "function", "function": function}


def _result(block: _Block) -> list[dict[str, Any]]:
    message = {"role": "tool", "tool_call_id": block.tool_use_id or "", "content": block.content or ""}
    if not isinstance(block.content, list):
        return [message]
    kinds = {item.get("type") for item in block.content}
    if "tool_reference" in kinds:
        raise CannotConvert("tool_reference")
    texts = [item.get("text", "") for item in block.content if item.get("type") == "text"]
    images = [_image(item.get("source", {})) for item in block.content if item.get("type") == "image"]
    message["content"] = "\n".join(texts)
    return [message, {"role": "user", "content": images}] if images else [message]


def _tool(tool: _Tool) -> dict[str, Any]:
    function: dict[str, Any] = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema if "type" in tool.input_schema else {**tool.input_schema, "type": "object"},
    }
    function |= {name: value for name in ("strict", "defer_loading") if (value := getattr(tool, name)) is not None}
    return {"type": "function", "function": function}
