"""A chat as the text that the engine tokenizes.

Two steps, as in vLLM: the messages of the request are brought into the shape that templates expect
(`as_templates_expect`), then the model's own jinja template writes the text, in the environment it was written for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvrelay.edge.tokens.service import CannotTokenize

TEXT_PARTS = frozenset(("text", "input_text", "output_text", "refusal", "thinking"))
TOOL_MEMBERS = frozenset(("type", "function"))


class ChatTemplate:
    """Raises jinja2.TemplateSyntaxError for a source that is none. `special` are tokens that templates use by name."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        environment = _environment()
        self._template = environment.from_string(source)
        self._special = dict(special)
        self._wants_parts = _wants_parts(environment.parse(source))
        self.tells_time = "strftime_now" in source

    def render(self, payload: Mapping[str, msgspec.Raw]) -> str:
        """`payload`: members of the chat request. Raises CannotTokenize."""
        if "chat_template" in payload:
            raise CannotTokenize("own_chat_template")
        try:
            members = {name: msgspec.json.decode(value) for name, value in payload.items()}
            return self._render(members)
        except CannotTokenize:
            raise
        except Exception as error:  # whatever a template or a client's message makes of it
            raise CannotTokenize("template_failed") from error

    def _render(self, members: Mapping[str, Any]) -> str:
        if members.get("continue_final_message"):
            raise CannotTokenize("continues_final_message")
        tools = members.get("tools")
        options: dict[str, Any] = {
            **self._special,
            "messages": [as_templates_expect(each, wants_parts=self._wants_parts) for each in members["messages"]],
            "tools": None if tools is None else [tool_as_templates_expect(each) for each in tools],
            "documents": members.get("documents"),
            "add_generation_prompt": members.get("add_generation_prompt", True),
            **(members.get("chat_template_kwargs") or {}),
        }
        return self._template.render(options)


def as_templates_expect(message: Mapping[str, Any], *, wants_parts: bool) -> dict[str, Any]:
    """Contents all as texts, or all as lists of parts; the arguments of tool calls as objects. Unknown members go."""
    role = message["role"]
    made: dict[str, Any] = {"role": role, "content": _content(message.get("content"), wants_parts=wants_parts)}
    if role == "assistant":
        if message.get("tool_calls"):
            made["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
        if message.get("reasoning") is not None:
            made["reasoning"] = made["reasoning_content"] = message["reasoning"]
    elif role == "tool" and "tool_call_id" in message:
        made["tool_call_id"] = message["tool_call_id"]
    elif role == "developer":
        made["tools"] = message.get("tools")
    if isinstance(message.get("name"), str):
        made["name"] = message["name"]
    return made


def _content(content: str | Sequence[Any] | None, *, wants_parts: bool) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if wants_parts else content
    texts = [text for text in map(_text_of, content or ()) if text is not None]
    if wants_parts:
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _text_of(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    kind = part.get("type")
    if kind not in TEXT_PARTS:
        raise CannotTokenize("content_part_not_text")
    text: str | None = part.get(kind if kind in ("refusal", "thinking") else "text")
    return text


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    arguments = function.get("arguments") or {}
    function["arguments"] = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {**call, "function": function}


def tool_as_templates_expect(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The engine reads tools into a model of its own: members come in its order, and what is missing is null."""
    if tool.get("type", "function") != "function":
        return dict(tool)
    stated = tool["function"]
    function = {"name": stated["name"], "description": None, "parameters": None, **stated}
    return {"type": "function", "function": function, **{name: tool[name] for name in tool if name not in TOOL_MEMBERS}}


def _wants_parts(template: nodes.Template) -> bool:
    """Whether the template goes through a message's content part by part."""
    names = {"content"}
    for assignment in template.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, names):
            names.add(assignment.target.name)
    return any(_is_content(loop.iter, names) for loop in template.find_all(nodes.For))


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    while isinstance(node, nodes.Filter | nodes.Test) and node.node is not None:
        node = node.node
    match node:
        case nodes.Name():
            return node.name in names
        case nodes.Getattr():
            return node.attr == "content"
        case nodes.Getitem():
            if isinstance(node.arg, nodes.Const):
                return bool(node.arg.value == "content")
            return isinstance(node.arg, nodes.Slice) and _is_content(node.node, names)
    return False


# --- the environment that chat templates are written for -----------------------------------------------------------


class _Generation(Extension):
    """`{% generation %}` marks what an assistant said, for training; here it is only what it contains."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_from_template
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja's own filter it writes `<` and `&` as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_from_template(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
