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
from kvrelay.edge.system.unreadable import UNREADABLE
from kvrelay.edge.tokens import messages

MESSAGES_PATH = "/v1/messages"  # of Anthropic's API
COUNTED_ON_REQUEST = frozenset(("/v1/completions", "/v1/chat/completions"))  # where `stream_options` are known
SCORED_PATHS = COUNTED_ON_REQUEST | {MESSAGES_PATH}

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
    stream: Raw | UnsetType = UNSET
    stream_options: Raw | UnsetType = UNSET
    cache_salt: Raw | UnsetType = UNSET
    prompt_logprobs: Raw | UnsetType = UNSET
    echo: Raw | UnsetType = UNSET
    logprobs: Raw | UnsetType = UNSET
    messages: Raw | UnsetType = UNSET
    tools: Raw | UnsetType = UNSET
    add_generation_prompt: Raw | UnsetType = UNSET
    continue_final_message: Raw | UnsetType = UNSET
    chat_template: Raw | UnsetType = UNSET
    chat_template_kwargs: Raw | UnsetType = UNSET
    documents: Raw | UnsetType = UNSET
    system: Raw | UnsetType = UNSET
    thinking: Raw | UnsetType = UNSET
    output_config: Raw | UnsetType = UNSET


class TokenPrompt(Struct, frozen=True, eq=False):
    """Token ids, used as they are. `total_tokens` counts all prompts of a list; `token_ids` is the first."""

    token_ids: TokenIds
    total_tokens: int


class TextPrompt:
    """Text that a tokenizer must see, unless its tokens are known under its JSON.

    `payload` is what a worker's tokenize endpoint wants, model aside. To `read` it costs more than to look the tokens
    up, and so comes second.
    """

    __slots__ = ("_payload", "is_chat", "raw")

    def __init__(self, raw: bytes, payload: Mapping[str, Any] | None = None, *, is_chat: bool) -> None:
        self.raw = raw
        self.is_chat = is_chat
        self._payload = payload

    @property
    def payload(self) -> Mapping[str, Any]:
        """Only of a prompt that `read` has no complaint about."""
        problem = None if self._payload is not None else self.read()
        assert self._payload is not None, problem
        return self._payload

    def read(self) -> Unscored | None:
        """Why no tokenizer can tell the tokens, or None. May be called again."""
        if self.is_chat:
            return Unscored("multimodal_input") if any(mark in self.raw for mark in MEDIA_MARKS) else None
        if self._payload is None:
            text = _only_text(self.raw)
            if isinstance(text, Unscored):
                return text
            self._payload = {"prompt": text}
        return None


class MessagesPrompt(TextPrompt):
    """A chat in the words of Anthropic's API; `members` are those that change the prompt."""

    __slots__ = ("_members",)

    def __init__(self, members: Mapping[str, Raw]) -> None:
        super().__init__(MESSAGES_PATH.encode() + _named(members), is_chat=True)
        self._members = members

    def read(self) -> Unscored | None:
        problem = super().read()
        if problem is not None or self._payload is not None:
            return problem
        try:
            chat = messages.as_chat(msgspec.json.encode(self._members))
        except messages.CannotConvert as reason:
            return Unscored(str(reason))
        except UNREADABLE:
            return Unscored("prompt_shape_unknown")
        self._payload = {name: Raw(msgspec.json.encode(value)) for name, value in chat.items()}
        return None


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
    except UNREADABLE:
        return RequestBody(Unscored("body_not_json" if body else "no_body"))
    streams = members.stream is not UNSET and bytes(members.stream) == b"true"
    options = members.stream_options
    hides_usage = streams and path in COUNTED_ON_REQUEST and leaves_usage_out(options)
    return RequestBody(
        prompt=_prompt(path, members) if path in SCORED_PATHS else Unscored("path_not_scored"),
        model=_text(members.model),
        streams=streams,
        hides_usage=hides_usage,
        stream_options=bytes(options) if hides_usage and options is not UNSET else None,
        cache_salt=_text(members.cache_salt),
    )


def chat_prompt(payload: Mapping[str, Raw]) -> TextPrompt:
    """Of the members that change a rendered chat, under their names: a list of tools is not a list of documents."""
    return TextPrompt(_named(payload), payload, is_chat=True)


def _named(members: Mapping[str, Raw]) -> bytes:
    return b"".join([b"%b\0%b\0" % (name.encode(), value) for name, value in members.items()])


def with_salt(body: bytes, tenant_salt: str) -> tuple[bytes, str] | None:
    """The body with a cache salt that is the tenant's own, and that salt; None if the body is not a JSON object.

    The one case in which a body is not relayed as it came: prefixes of different tenants must not meet in a worker.
    """
    try:
        members: dict[str, Raw | str] = dict(_decode_members_by_name(body))
    except UNREADABLE:
        return None
    own = members.get("cache_salt")
    salt = joined_salt(tenant_salt, _text(own) if isinstance(own, Raw) else None)
    members["cache_salt"] = salt
    return msgspec.json.encode(members), salt


def joined_salt(tenant_salt: str, asked: str | None) -> str:
    """A client may separate its own requests further, never leave its tenant."""
    return f"{tenant_salt}:{asked}" if asked else tenant_salt


def _computes_all(members: _Members) -> bool:
    """Who wants probabilities of the prompt's own tokens has all of it computed, whatever is cached."""
    if _stated(members.prompt_logprobs):
        return True
    return members.echo is not UNSET and bytes(members.echo) == b"true" and _stated(members.logprobs)


def _stated(member: Raw | UnsetType) -> bool:
    return member is not UNSET and bytes(member) not in (b"null", b"false")


def _prompt(path: str, members: _Members) -> TokenPrompt | TextPrompt | Unscored:
    if _computes_all(members):
        return Unscored("prompt_logprobs")
    if path == "/v1/completions":
        if members.prompt is UNSET:
            return Unscored("no_prompt")
        return _completion_prompt(bytes(members.prompt))
    if members.messages is UNSET:
        return Unscored("no_messages")
    if path == MESSAGES_PATH:
        return MessagesPrompt(_members_named(members, messages.MEMBERS))
    return chat_prompt(_members_named(members, CHAT_MEMBERS))


def _members_named(members: _Members, names: tuple[str, ...]) -> dict[str, Raw]:
    return {name: value for name in names if (value := getattr(members, name)) is not UNSET}


def _completion_prompt(raw: bytes) -> TokenPrompt | TextPrompt | Unscored:
    try:
        if raw[:1] == b'"':
            return TextPrompt(raw, is_chat=False)
        if raw[:1] != b"[":
            return Unscored("prompt_shape_unknown")
        match raw[1:64].lstrip()[:1]:
            case b"[":
                lists = _decode_lists(raw)
                return TokenPrompt(_ids(lists[0]), sum(map(len, lists)))
            case b'"':
                return TextPrompt(raw, is_chat=False)
            case b"]":
                return Unscored("prompt_empty")
            case _:
                token_ids = _ids(_decode_ids(raw))
                return TokenPrompt(token_ids, len(token_ids))
    except (*UNREADABLE, OverflowError):
        return Unscored("prompt_shape_unknown")


def _only_text(raw: bytes) -> str | Unscored:
    """Several texts would each have to be tokenized to be charged; one is the usual case."""
    try:
        if raw[:1] == b'"':
            return _decode_text(raw)
        texts = _decode_texts(raw)
    except UNREADABLE:
        return Unscored("prompt_shape_unknown")
    return texts[0] if len(texts) == 1 else Unscored("several_text_prompts")


def _ids(token_ids: list[int]) -> TokenIds:
    return np.frombuffer(array("I", token_ids), dtype=np.uint32)


def _text(raw: Raw | UnsetType) -> str | None:
    if raw is UNSET:
        return None
    try:
        return _decode_text(raw)
    except UNREADABLE:
        return None
