"""The mock's tokenizer: one token per UTF-8 byte, a few special tokens, a ChatML-like template.

Text that spells a special token becomes that token, as in real engines. Ids above the special ones are legal in prompts
(traces are replayed with them) up to the stated vocabulary size; they have no text of their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from msgspec import Struct

from kvrelay.core.model.prompt import TokenIds

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image|>")
FIRST_SPECIAL_ID = 256
_END_OF_SPECIAL_IDS = FIRST_SPECIAL_ID + len(SPECIAL_TOKENS)
_IDS = {text: FIRST_SPECIAL_ID + i for i, text in enumerate(SPECIAL_TOKENS)}
_SPLIT = re.compile("(" + "|".join(re.escape(text) for text in SPECIAL_TOKENS) + ")")


class TextPart(Struct):
    """A member of a message's content list; what is neither text nor an image is refused."""

    type: str
    text: str | None = None
    image_url: dict[str, str] | str | None = None


class ChatMessage(Struct):
    role: str
    content: str | list[TextPart] | None = None
    tool_calls: list[Any] | None = None


def encode(text: str) -> TokenIds:
    """Token ids of a text, without any token added."""
    parts: list[TokenIds] = []
    for piece in _SPLIT.split(text):
        special = _IDS.get(piece)
        if special is not None:
            parts.append(np.array([special], dtype=np.uint32))
        elif piece:
            # a lone surrogate is legal in JSON and has no UTF-8: it becomes `?` rather than an error
            parts.append(np.frombuffer(piece.encode("utf-8", "replace"), dtype=np.uint8).astype(np.uint32))
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint32)


def decode(token_ids: Sequence[int]) -> str:
    """The text of token ids; an id without text shows as the replacement character."""
    text = bytearray()
    for token_id in token_ids:
        if token_id < FIRST_SPECIAL_ID:
            text.append(token_id)
        elif token_id < _END_OF_SPECIAL_IDS:
            text += SPECIAL_TOKENS[token_id - FIRST_SPECIAL_ID].encode()
        else:
            text += "\N{REPLACEMENT CHARACTER}".encode()
    return text.decode("utf-8", "replace")


def render_chat(
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Any] = (),
) -> str:
    """The conversation as the text that is tokenized: first the tools in their order, then the turns. A final message
    that is to be continued stays open."""
    turns = [f"<|im_start|>{message.role}\n{content_text(message)}<|im_end|>\n" for message in messages]
    if continue_final_message:
        turns[-1] = turns[-1].removesuffix("<|im_end|>\n")
    if tools:
        turns.insert(0, f"<|im_start|>system\n{_lines(map(_as_read, tools))}<|im_end|>\n")
    if add_generation_prompt:
        turns.append("<|im_start|>assistant\n")
    return "".join(turns)


def content_text(message: ChatMessage) -> str:
    """What a message says, as it stands in the conversation."""
    if message.content is None or isinstance(message.content, str):
        text = message.content or ""
    else:
        text = "\n".join(_part_text(part) for part in message.content)
    return text if not message.tool_calls else f"{text}\n{_lines(map(_with_object, message.tool_calls))}"


def _lines(values: Iterable[Any]) -> str:
    """As `tojson` in a template writes them."""
    return "\n".join(json.dumps(value, ensure_ascii=False) for value in values)


def _as_read(tool: Any) -> Any:
    """vLLM reads tools into a model of its own: what is missing is null."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return tool
    return {"type": "function", "function": {"name": None, "description": None, "parameters": None, **function}}


def _with_object(call: Any) -> Any:
    """Templates get the arguments of a call as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"] or "{}")}}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the arguments of a tool call are no JSON: {error}") from error


def _part_text(part: TextPart) -> str:
    if part.type == "text" and part.text is not None:
        return part.text
    if part.type == "image_url" and part.image_url is not None:
        url = part.image_url if isinstance(part.image_url, str) else part.image_url.get("url", "")
        return "<|image|>" + blake2b(url.encode(), digest_size=8).hexdigest()  # other image, other KV
    raise ValueError(f"content parts of type `{part.type}` are not supported; use `text` or `image_url`")
