"""Random conversations with tools, unpleasant texts among them."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec

from kvrelay.edge.gateway.openai import TextPrompt, read_body
from kvrelay.edge.tokens.selfcheck import NASTY
from tests.edge.tokens.families import OTHERS, words

_KNOWN = words(random.Random(2), 500)
_MARKS = ("<|im_start|>", "<|im_end|>", "</s>", "<s>", "[INST]", "[SEP]", "<tool_call>", "<|im_", "[/INST")
_GAPS = (" ", " ", " ", "  ", "\n", "\r\n", "\t", "")


def prompt_of(**members: Any) -> TextPrompt:
    found = read_body("/v1/chat/completions", msgspec.json.encode({"model": "m", **members})).prompt
    assert isinstance(found, TextPrompt), found
    return found


def text(chance: random.Random, most_words: int = 25) -> str:
    parts: list[str] = []
    for _ in range(chance.randint(0, most_words)):
        kind = chance.random()
        pool = _KNOWN if kind < 0.8 else OTHERS if kind < 0.9 else NASTY if kind < 0.97 else _MARKS
        parts += (chance.choice(pool), chance.choice(_GAPS))
    return "".join(parts)


def chat(chance: random.Random) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": text(chance)}] if chance.random() < 0.5 else []
    for _ in range(chance.randint(1, 6)):
        messages.append({"role": "user", "content": _maybe_parts(chance)})
        messages.append({"role": "assistant", "content": text(chance)})
        if chance.random() < 0.3:
            arguments = json.dumps({"word": text(chance, 4)})
            call = {"id": "c", "type": "function", "function": {"name": "look_up", "arguments": arguments}}
            messages[-1] |= {"content": None, "tool_calls": [call]}
            messages.append({"role": "tool", "tool_call_id": "c", "content": text(chance)})
    return {"messages": messages, "tools": [tool(chance) for _ in range(chance.randint(0, 3))]}


def tool(chance: random.Random) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {chance.choice(_KNOWN): {"type": "string"}}}
    function = {"name": chance.choice(_KNOWN), "description": text(chance, 8), "parameters": parameters}
    return {"type": "function", "function": function}


def _maybe_parts(chance: random.Random) -> str | list[dict[str, str]]:
    if chance.random() < 0.7:
        return text(chance)
    return [{"type": "text", "text": text(chance)} for _ in range(chance.randint(1, 3))]
