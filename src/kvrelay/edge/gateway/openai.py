"""What the gateway must know of a request body, and nothing more: the bytes themselves are relayed as they came.

A body that we cannot read is no reason to fail the request: it goes to a worker unscored, and the receipt says why.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, Raw, Struct, UnsetType

from kvrelay.core.model.prompt import TokenIds
from kvrelay.edge.gateway.unasked_usage import leaves_usage_out

SCORED_PATHS = frozenset(("/v1/completions", "/v1/chat/completions"))

# Parts of a message whose input never becomes text tokens that we could know.
MEDIA_MARKS = (b'"image_url"', b'"input_audio"', b'"video_url"', b'"image"', b'"audio_url"', b'"input_image"')

# Members of a chat request that change the rendered prompt; a worker's tokenize endpoint takes them by these names.
CHAT_MEMBERS = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "documents",
)


class _Members(Struct):
    """Every member is kept raw: a wrong type in one of them is the worker's to complain about."""

    model: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET
    messages: Raw | UnsetType = UNSET
    stream: Raw | UnsetType = UNSET
    stream_options: Raw | UnsetType = UNSET
    cache_salt: Raw | UnsetType = UNSET


class TokenPrompt(Struct, frozen=True, eq=False):
    """Token ids, used as they are. `total_tokens` counts all prompts of a list; `token_ids` is the first."""

    token_ids: TokenIds
    total_tokens: int


class TextPrompt(Struct, frozen=True):
    """Text that a tokenizer must see. `raw` is the JSON of `payload`, for the cache."""

    raw: bytes
    payload: Mapping[str, Any]  # what a worker's tokenize endpoint wants, model aside
    is_chat: bool


class Unscored(Struct, frozen=True):
    """No tokens can be known; `because` ends up in the receipt."""

    because: str


class RequestBody(Struct, frozen=True):
    """The readable part of a request body."""

    prompt: TokenPrompt | TextPrompt | Unscored
    model: str | None = None
    streams: bool = False
    hides_usage: bool = False  # a stream that ends without counts, because its client did not ask for them
    stream_options: bytes | None = None  # as sent; only where `hides_usage`
    cache_salt: str | None = None


_decode_members = msgspec.json.Decoder(_Members).decode
_decode_members_by_name = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_ids = msgspec.json.Decoder(list[int]).decode
_decode_lists = msgspec.json.Decoder(list[list[int]]).decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_texts = msgspec.json.Decoder(list[str]).decode


def read_body(path: str, body: bytes) -> RequestBody:
    """Never raises."""
    try:
        members = _decode_members(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return RequestBody(Unscored("body_not_json" if body else "no_body"))
    streams = members.stream is not UNSET and bytes(members.stream) == b"true"
    options = members.stream_options
    hides_usage = streams and path in SCORED_PATHS and leaves_usage_out(options)
    return RequestBody(
        prompt=_prompt(path, body, members) if path in SCORED_PATHS else Unscored("path_not_scored"),
        model=_text(members.model),
        streams=streams,
        hides_usage=hides_usage,
        stream_options=bytes(options) if hides_usage and options is not UNSET else None,
        cache_salt=_text(members.cache_salt),
    )


def with_salt(body: bytes, tenant_salt: str) -> tuple[bytes, str] | None:
    """The body with a cache salt that is the tenant's own, and that salt; None if the body is not a JSON object.

    The one case in which a body is not relayed as it came: prefixes of different tenants must not meet in a worker.
    """
    try:
        members: dict[str, Raw | str] = dict(_decode_members_by_name(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    own = members.get("cache_salt")
    asked = _text(own) if isinstance(own, Raw) else None
    salt = f"{tenant_salt}:{asked}" if asked else tenant_salt
    members["cache_salt"] = salt
    return msgspec.json.encode(members), salt


def _prompt(path: str, body: bytes, members: _Members) -> TokenPrompt | TextPrompt | Unscored:
    if path == "/v1/completions":
        if members.prompt is UNSET:
            return Unscored("no_prompt")
        return _completion_prompt(bytes(members.prompt))
    if members.messages is UNSET:
        return Unscored("no_messages")
    raw = bytes(members.messages)
    if any(mark in raw for mark in MEDIA_MARKS):
        return Unscored("multimodal_input")
    everything = _decode_members_by_name(body)
    payload = {name: everything[name] for name in CHAT_MEMBERS if name in everything}
    return TextPrompt(b"\0".join(bytes(value) for value in payload.values()), payload, is_chat=True)


def _completion_prompt(raw: bytes) -> TokenPrompt | TextPrompt | Unscored:
    try:
        if raw[:1] == b'"':
            return TextPrompt(raw, {"prompt": _decode_text(raw)}, is_chat=False)
        if raw[:1] != b"[":
            return Unscored("prompt_shape_unknown")
        match raw[1:64].lstrip()[:1]:
            case b"[":
                lists = _decode_lists(raw)
                return TokenPrompt(_ids(lists[0]), sum(map(len, lists)))
            case b'"':
                return _text_of_list(raw)
            case b"]":
                return Unscored("prompt_empty")
            case _:
                token_ids = _ids(_decode_ids(raw))
                return TokenPrompt(token_ids, len(token_ids))
    except (msgspec.DecodeError, OverflowError, UnicodeDecodeError):
        return Unscored("prompt_shape_unknown")


def _text_of_list(raw: bytes) -> TextPrompt | Unscored:
    """Several texts would each have to be tokenized to be charged; one is the usual case."""
    texts = _decode_texts(raw)
    if len(texts) > 1:
        return Unscored("several_text_prompts")
    return TextPrompt(raw, {"prompt": texts[0]}, is_chat=False)


def _ids(token_ids: list[int]) -> TokenIds:
    return np.frombuffer(array("I", token_ids), dtype=np.uint32)


def _text(raw: Raw | UnsetType) -> str | None:
    if raw is UNSET:
        return None
    try:
        return _decode_text(raw)
    except msgspec.DecodeError:
        return None
