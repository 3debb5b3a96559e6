"""A stream that is followed so closely that another worker can go on with it where the first one broke.

With `retry.migrate` every stream of the two generating paths has a `StreamFollower`. It lets whole events pass only,
notes what the client has got (text, and token ids where the worker tells them on request), and, when the worker is
lost, says whether the rest can come from another one and with which request:

- a completion: the token ids of prompt and answer so far, or prompt and answer as text where ids are not known;
- a chat: the messages and the answer so far as an assistant message that is to be continued;
- both with what is left of `max_tokens`.

A worker that is lost behind the reason for the end, before the end itself, needs no successor: what is missing then
is known, and said for it (`closing`).

The stream of the next worker is joined so that its client cannot tell: id, time and model stay, the role is not said
twice, counts are those of the whole. Whatever would show, or would not be the same answer, is not continued, and the
receipt has the word for it. Resuming begins behind the last token whose text the client has: text that an engine held
back (half a character, the beginning of a stop string) is generated again.

Greedy answers are the same as undisturbed ones where ids are used. Text is tokenized again by the next worker, which
may cut it otherwise at the seam; sampled answers go on from another state of chance, with or without a seed.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from kvrelay.core.model.events import CanGoOn, CannotGoOn
from kvrelay.core.model.prompt import Usage
from kvrelay.edge.gateway.openai import COUNTED_ON_REQUEST
from kvrelay.edge.system.unreadable import UNREADABLE

MAX_EVENT_BYTES = 1024 * 1024
CHAT_PATH = "/v1/chat/completions"
COMPLETION_DEFAULT_TOKENS = 16  # what a completion without `max_tokens` gets of engines with vLLM's dialect

_DATA = b"data:"
_DONE = b"[DONE]"
_LAST_EVENT = b"data: [DONE]\n\n"
_BOUNDARY = re.compile(rb"\r\n\r\n|\n\n")
_IDS = re.compile(rb'(?<=token_ids":)\s*\[[^\]]*\]')  # inside a text the quote would be escaped
_PROMPT_IDS = re.compile(rb'(?<="prompt_token_ids":)\s*\[[^\]]*\]')
_NULL, _FALSE, _NOTHING = b"null", b"false", b"[]"

# Members that make an answer which nobody else could continue unseen, and the values with which they do not.
_IN_THE_WAY: dict[str, tuple[str, tuple[bytes, ...]]] = {
    "n": ("several_choices", (_NULL, b"1")),
    "best_of": ("several_choices", (_NULL, b"1")),
    "use_beam_search": ("several_choices", (_NULL, _FALSE)),
    "logprobs": ("logprobs", (_NULL, _FALSE)),
    "top_logprobs": ("logprobs", (_NULL, b"0")),
    "prompt_logprobs": ("logprobs", (_NULL,)),
    "echo": ("echo", (_NULL, _FALSE)),
    "suffix": ("suffix", (_NULL, b'""')),
    "prompt_embeds": ("prompt_embeds", (_NULL,)),
    "functions": ("tools", (_NULL, _NOTHING)),
    "response_format": ("structured_output", (_NULL, b'{"type":"text"}', b'{"type": "text"}')),
    "structured_outputs": ("structured_output", (_NULL,)),
    "guided_json": ("structured_output", (_NULL,)),
    "guided_regex": ("structured_output", (_NULL,)),
    "guided_choice": ("structured_output", (_NULL,)),
    "guided_grammar": ("structured_output", (_NULL,)),
    "frequency_penalty": ("penalties", (_NULL, b"0", b"0.0")),  # count what was generated, not what was prompted
    "presence_penalty": ("penalties", (_NULL, b"0", b"0.0")),
    "kv_transfer_params": ("kv_transfer", (_NULL,)),
}


class _Delta(Struct):
    role: str | None = None
    content: str | None = None
    tool_calls: list[Raw] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @property
    def empty(self) -> bool:
        return not (self.role or self.content or self.tool_calls or self.reasoning or self.reasoning_content)


class _Choice(Struct):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _Chunk(Struct):
    id: Raw | UnsetType = UNSET
    created: Raw | UnsetType = UNSET
    model: Raw | UnsetType = UNSET
    choices: list[_Choice] = []
    usage: dict[str, Any] | None = None
    error: Any = None
    prompt_token_ids: list[int] | None = None


_decode_members = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_chunk = msgspec.json.Decoder(_Chunk).decode


def follow(path: str, body: bytes) -> StreamFollower | None:
    """A follower for the stream that this request asks for; None where nothing is known of such streams."""
    if path not in COUNTED_ON_REQUEST:
        return None
    try:
        return StreamFollower(_decode_members(body), chat=path == CHAT_PATH)
    except UNREADABLE:
        return None


class StreamFollower:
    """One client's stream over all its attempts."""

    def __init__(self, members: dict[str, Raw], *, chat: bool) -> None:
        self._members = members
        self._chat = chat
        self._because = _in_the_way(members)
        self._following = self._because is None
        self._asks_ids = False
        self._joining = False
        self._held = b""
        self._envelope: dict[str, Raw] = {}  # id, created, model: as the client saw them first
        self._said_role = False
        self._text: list[str] = []
        self._ids: list[int] | None = []  # of `_text`; None: a worker did not tell them
        self._pending_ids: list[int] = []  # no text came of them yet
        self._prompt_ids: list[int] | None = None
        self._tokens = 0
        self._tokens_before = 0  # of earlier attempts
        self._said_usage = False
        self.ended = False
        """The answer is complete: a reason for its end was said, or the end itself."""
        self.failed: str | None = None
        """The worker said in its stream that it failed; nothing more of this attempt passes."""

    # --- the request -------------------------------------------------------------------------------------------------

    def asking(self, body: bytes, *, shows_ids: bool) -> bytes:
        """The body for one attempt, with the question for token ids in it where the worker knows that question."""
        self._asks_ids = shows_ids and self._following and "return_token_ids" not in self._members
        if not self._asks_ids:
            return body
        end = body.rfind(b"}")
        return b"".join((body[:end], b',"return_token_ids":true', body[end:]))

    def rest(self) -> CanGoOn | CannotGoOn:
        """Whether another worker could go on behind what the client has by now."""
        because = self._because or ("nothing_left" if self.ended else None)
        if because is None:
            try:
                self.continuation()
                return CanGoOn(self._tokens)
            except _Hindrance as hindrance:
                because = hindrance.because
        return CannotGoOn(because)

    def continuation(self) -> bytes:
        """The request that continues the answer. Only after `rest()` said that it can go on."""
        if not self._text:
            return msgspec.json.encode(self._members)
        members: dict[str, Any] = dict(self._members)
        if self._chat:
            members |= {
                "messages": self._messages(),
                "add_generation_prompt": False,
                "continue_final_message": True,
            }
        else:
            members["prompt"] = self._prompt()
        self._reduce_limits(members)
        return msgspec.json.encode(members)

    def closing(self) -> bytes | None:
        """What is missing behind an answer that was said to its end; None: there is more, or something is not known."""
        if not self.ended or self._because is not None or not self._following:
            return None
        if self._said_usage or not self._wants_usage():
            return _LAST_EVENT
        usage = self._own_usage()
        if usage.prompt_tokens is None or usage.completion_tokens is None:
            return None
        counts = {
            "prompt_tokens": usage.prompt_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "completion_tokens": usage.completion_tokens,
        }
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        event = {"object": kind, **self._envelope, "choices": [], "usage": counts}
        return _as_event(event) + _LAST_EVENT

    def _wants_usage(self) -> bool:
        options = msgspec.json.decode(self._members.get("stream_options", Raw(_NULL)))
        return isinstance(options, dict) and bool(options.get("include_usage"))

    def _own_usage(self) -> Usage:
        """The counts as far as the stream itself showed them: all of them where the worker told its token ids."""
        prompt_tokens = None if self._prompt_ids is None else len(self._prompt_ids)
        exact = self._ids is not None and (self._ids or self._pending_ids)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self._tokens + len(self._pending_ids) if exact else None,
        )

    def begin(self, *, continues: bool) -> None:
        """The next attempt begins; what was held back of the last one is dropped."""
        self._joining = continues
        self._held = b""
        self._pending_ids = []
        self._tokens_before = self._tokens
        self.failed = None

    def _messages(self) -> list[Any]:
        messages = msgspec.json.decode(self._members["messages"], type=list[Raw])
        said = "".join(self._text)
        if not _is_true(self._members.get("continue_final_message")):
            return [*messages, {"role": "assistant", "content": said}]
        last = msgspec.json.decode(messages[-1], type=dict[str, Any])
        if not isinstance(last.get("content"), str):
            raise _Hindrance("final_message_not_text")
        return [*messages[:-1], {**last, "content": last["content"] + said}]

    def _prompt(self) -> str | list[int]:
        received = _one_prompt(self._members)
        ids = received if isinstance(received, list) else self._prompt_ids
        # With stop strings the text lags behind the ids, so what the client has is known as text only.
        if ids is not None and self._ids is not None and not self._has_stop_strings():
            return ids + self._ids
        if isinstance(received, str):
            return received + "".join(self._text)
        raise _Hindrance("stop_strings" if self._ids is not None else "token_ids_unknown")

    def _has_stop_strings(self) -> bool:
        return bytes(self._members.get("stop", Raw(_NULL))) not in (_NULL, _NOTHING, b'""')

    def _reduce_limits(self, members: dict[str, Any]) -> None:
        asked = [name for name in ("max_tokens", "max_completion_tokens") if _number(self._members.get(name))]
        limits = {name: _number(self._members[name]) for name in asked}
        if not limits and not self._chat:
            if self._ids is None:  # of another dialect, whose default is not known
                raise _Hindrance("limit_unknown")
            limits = {"max_tokens": COMPLETION_DEFAULT_TOKENS}
        for name, limit in limits.items():
            left = limit - self._tokens
            if left < 1:
                raise _Hindrance("nothing_left")
            members[name] = left
        least = _number(self._members.get("min_tokens"))
        if least:
            members["min_tokens"] = max(0, least - self._tokens)

    # --- the stream --------------------------------------------------------------------------------------------------

    def take(self, data: bytes) -> bytes:
        """What of the stream may pass now."""
        if not self._following:
            return data
        data = self._held + data
        passed: list[bytes] = []
        start = 0
        for boundary in _BOUNDARY.finditer(data):
            if self.failed is None:
                passed.append(self._event(data[start : boundary.end()]))
            start = boundary.end()
        self._held = data[start:]
        if len(self._held) > MAX_EVENT_BYTES:
            passed.append(self._too_long())
        return b"".join(passed)

    def take_rest(self) -> bytes:
        """What was held back when the stream ended."""
        held, self._held = self._held, b""
        return b"" if self.failed is not None else held

    def usage(self, last: Usage) -> Usage:
        """The counts of the whole, from those of the last attempt; of the stream itself, if it was lost before them."""
        if self.ended and last == Usage():
            return self._own_usage()
        before = self._tokens_before
        if not before:
            return last
        prompt_tokens = self._prompt_tokens(last.prompt_tokens)
        cached = last.cached_tokens
        return msgspec.structs.replace(
            last,
            prompt_tokens=prompt_tokens,
            completion_tokens=None if last.completion_tokens is None else last.completion_tokens + before,
            cached_tokens=cached if cached is None or prompt_tokens is None else min(cached, prompt_tokens),
        )

    def _prompt_tokens(self, of_continuation: int | None) -> int | None:
        if self._prompt_ids is not None:
            return len(self._prompt_ids)
        return None if of_continuation is None else of_continuation - self._tokens_before

    def _too_long(self) -> bytes:
        """Nobody sends such events; the stream passes, but is not followed any more."""
        self._because = "event_too_long"
        if self._joining:
            self.failed = "an event of more than a megabyte"
            return b""
        self._following = False
        return self.take_rest()

    def _event(self, event: bytes) -> bytes:
        if not event.startswith(_DATA):
            return event
        payload = event[len(_DATA) :].strip()
        if payload == _DONE:
            self.ended = True
            return event
        try:
            chunk = _decode_chunk(payload)
        except UNREADABLE:
            self._because = self._because or "not_understood"
            return event
        if chunk.error is not None and self._is_workers_failure(chunk.error):
            return b""
        if any(choice.finish_reason == "abort" for choice in chunk.choices):
            self.failed = "the engine aborted it"
            return b""
        repeats_role = self._said_role and self._joining
        silent = self._asks_ids and _says_nothing(chunk)
        self._note(chunk)
        if silent:
            return b""
        if self._asks_ids:
            event = _IDS.sub(_NULL, event)
        elif self._joining:
            event = _PROMPT_IDS.sub(_NULL, event)
        return self._joined(event, chunk, repeats_role=repeats_role) if self._joining else event

    def _is_workers_failure(self, error: Any) -> bool:
        code = error.get("code") if isinstance(error, dict) else None
        if isinstance(code, int) and code < 500:  # the client's own mistake, which passes
            self.ended = True
            return False
        self.failed = "an error in its stream"
        return True

    def _note(self, chunk: _Chunk) -> None:
        """What the client has of the answer once this chunk has passed."""
        if not self._envelope:
            for name in ("id", "created", "model"):
                value = getattr(chunk, name)
                if value is not UNSET:
                    self._envelope[name] = Raw(bytes(value))
        for choice in chunk.choices:
            if not self._joining and self._prompt_ids is None:
                self._prompt_ids = choice.prompt_token_ids or chunk.prompt_token_ids
            self._note_choice(choice)
        self._said_usage = self._said_usage or chunk.usage is not None

    def _note_choice(self, choice: _Choice) -> None:
        delta = choice.delta
        if choice.index:
            self._because = self._because or "several_choices"
        if delta is not None:
            self._said_role = self._said_role or delta.role is not None
            if delta.tool_calls:
                self._because = self._because or "tools"
            if delta.reasoning or delta.reasoning_content:
                self._because = self._because or "reasoning"
        self._note_text(choice.text if delta is None else delta.content, choice.token_ids)
        if choice.finish_reason is not None:
            self.ended = True

    def _note_text(self, text: str | None, token_ids: list[int] | None) -> None:
        if token_ids:
            self._pending_ids += token_ids
        if not text:
            return
        self._text.append(text)
        if self._ids is not None and self._pending_ids:
            self._ids += self._pending_ids
            self._tokens += len(self._pending_ids)
        else:
            self._ids = None
            self._tokens += len(self._pending_ids) or 1
        self._pending_ids = []

    def _joined(self, event: bytes, chunk: _Chunk, *, repeats_role: bool) -> bytes:
        """An event of a later worker as the first one would have sent it."""
        members: dict[str, Any] = dict(_decode_members(event[len(_DATA) :]))
        members |= {name: value for name, value in self._envelope.items() if name in members}
        if repeats_role and any(choice.delta is not None and choice.delta.role for choice in chunk.choices):
            if all(choice.finish_reason is None and _only_role(choice.delta) for choice in chunk.choices):
                return b""
            members["choices"] = _without_role(members["choices"])
        if chunk.usage is not None:
            members["usage"] = self._whole_usage(chunk.usage)
        return _as_event(members)

    def _whole_usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if not isinstance(prompt, int) or not isinstance(completion, int):
            return usage
        prompt_tokens, completion_tokens = self._prompt_tokens(prompt), completion + self._tokens_before
        assert prompt_tokens is not None
        whole = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
        whole["total_tokens"] = prompt_tokens + completion_tokens
        return {name: whole.get(name, value) for name, value in usage.items()}


def _as_event(members: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(members) + b"\n\n"


class _Hindrance(Exception):
    """The answer cannot be continued; `because` ends up in the receipt."""

    def __init__(self, because: str) -> None:
        super().__init__(because)
        self.because = because


def _in_the_way(members: dict[str, Raw]) -> str | None:
    for name, (because, harmless) in _IN_THE_WAY.items():
        if name in members and bytes(members[name]) not in harmless:
            return because
    choice = bytes(members.get("tool_choice", Raw(_NULL)))
    if bytes(members.get("tools", Raw(_NULL))) not in (_NULL, _NOTHING) and choice != b'"none"':
        return "tools"
    if b"continuous_usage_stats" in bytes(members.get("stream_options", Raw(_NULL))):
        return "continuous_usage"
    return None


def _one_prompt(members: dict[str, Raw]) -> str | list[int]:
    """The prompt as text or token ids; several of them could not be told apart in one stream."""
    received = msgspec.json.decode(members.get("prompt", Raw(_NULL)))
    if isinstance(received, list) and received and isinstance(received[0], str | list):
        if len(received) > 1:
            raise _Hindrance("several_prompts")
        received = received[0]
    if isinstance(received, str) or (isinstance(received, list) and all(type(each) is int for each in received)):
        return received
    raise _Hindrance("prompt_shape_unknown")


def _says_nothing(chunk: _Chunk) -> bool:
    """An event that only our question for ids has brought: tokens whose text the engine still holds back."""
    if chunk.usage is not None or not chunk.choices:
        return False
    return all(each.finish_reason is None and each.delta is not None and each.delta.empty for each in chunk.choices)


def _only_role(delta: _Delta | None) -> bool:
    return delta is None or not (delta.content or delta.tool_calls)


def _without_role(choices: Raw) -> list[Any]:
    read = msgspec.json.decode(choices, type=list[dict[str, Any]])
    for choice in read:
        choice.get("delta", {}).pop("role", None)
    return read


def _is_true(raw: Raw | None) -> bool:
    return raw is not None and bytes(raw) == b"true"


def _number(raw: Raw | None) -> int:
    """0 for what is absent, null or no number."""
    digits = b"" if raw is None else bytes(raw)
    return int(digits) if digits.isdigit() and len(digits) < 10 else 0
