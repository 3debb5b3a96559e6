"""Anthropic's Messages: /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from msgspec import Struct

from kvrelay.core.engine.engine import Finished
from kvrelay.core.model.prompt import TokenIds
from kvrelay.edge.http.server import Exchange
from kvrelay.edge.system.unreadable import UNREADABLE
from kvrelay.edge.tokens.messages import CannotConvert, as_chat
from kvrelay.edge.worker import answers, tokenizer, toolcall
from kvrelay.edge.worker.answers import RequestError
from kvrelay.edge.worker.dialect import Choice
from kvrelay.edge.worker.generation import Generation, Limit, adapter_of, chat_tokens, decode_body, make_generation
from kvrelay.edge.worker.reply import Reply
from kvrelay.edge.worker.spec import MockSpec
from kvrelay.edge.worker.tokenizer import ChatMessage
from kvrelay.edge.worker.toolcall import ToolCall, forced_call


class _Prompt(Struct, kw_only=True):
    """What counting tokens takes, too. The rest of the prompt is read by `as_chat`."""

    model: str
    tools: list[Any] | None = None


class _Choice(Struct):
    type: str = "auto"
    name: str | None = None


class _Body(_Prompt, kw_only=True):
    max_tokens: int
    tool_choice: _Choice | None = None
    stream: bool | None = None
    cache_salt: str | None = None


def read(body: bytes, spec: MockSpec) -> Generation:
    """`max_tokens` is a must here, so the mock's reply ends by itself when it is `reply_tokens` long."""
    received = decode_body(body, _Body)
    chosen = received.tool_choice or _Choice()
    call = forced_call(
        received.tools, named=chosen.name if chosen.type == "tool" else None, required=chosen.type == "any"
    )
    natural = received.max_tokens >= spec.reply_tokens
    return make_generation(
        dialect=partial(MessagesDialect, call=call),
        id_prefix="msg_",
        spec=spec,
        model=received.model,
        prompts=(_tokens(body),),
        limit=Limit(spec.reply_tokens if natural else received.max_tokens, natural=natural),
        salt=received.cache_salt,
        stream=received.stream,
    )


def count_tokens(exchange: Exchange, spec: MockSpec) -> None:
    received = decode_body(exchange.body, _Prompt)
    adapter_of(received.model, spec)
    answers.respond_json(exchange, {"input_tokens": len(_tokens(exchange.body))})


def _tokens(body: bytes) -> TokenIds:
    try:
        chat = as_chat(body)
        messages = msgspec.convert(chat["messages"], list[ChatMessage])
    except CannotConvert as reason:
        raise RequestError(400, f"not supported: {reason}", param="messages") from reason
    except UNREADABLE as error:
        raise RequestError(400, f"Invalid request body: {error}") from error
    return chat_tokens(messages, tools=chat.get("tools"))


class MessagesDialect:
    """One block of content: a text, or one use of a tool."""

    def __init__(self, reply: Reply, *, call: ToolCall | None) -> None:
        self._reply = reply
        self._call = call

    def whole(self) -> dict[str, Any]:
        (choice,) = self._reply.choices.values()
        assert choice.finished is not None
        return self._message([self._block(choice)], self._stop_reason(choice.finished), self._usage())

    def opening(self) -> bytes:
        counts = {"input_tokens": len(self._reply.generation.prompts[0]), "output_tokens": 0}
        return _event("message_start", message=self._message([], None, counts))

    def first(self, choice: Choice) -> bytes:
        empty = {"type": "text", "text": ""} if self._call is None else self._tool_use({})
        return _event("content_block_start", index=0, content_block=empty)

    def token(self, choice: Choice, finished: Finished | None) -> bytes:
        piece = chr(choice.token_ids[-1])
        if self._call is None:
            return _event("content_block_delta", index=0, delta={"type": "text_delta", "text": piece})
        before = self._call.before if len(choice.token_ids) == 1 else ""
        partial_json = before + piece + ("" if finished is None else toolcall.AFTER)
        delta = {"type": "input_json_delta", "partial_json": partial_json}
        return _event("content_block_delta", index=0, delta=delta)

    def closing(self) -> bytes:
        (choice,) = self._reply.choices.values()
        assert choice.finished is not None
        delta = {"stop_reason": self._stop_reason(choice.finished), "stop_sequence": None}
        ended = _event("message_delta", delta=delta, usage=self._usage(), kvrelay_mock=self._reply.mark())
        return _event("content_block_stop", index=0) + ended + _event("message_stop")

    def _message(self, content: list[Any], stop_reason: str | None, usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": self._reply.reply_id,
            "type": "message",
            "role": "assistant",
            "model": self._reply.generation.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": None,
            "usage": usage,
        }

    def _block(self, choice: Choice) -> dict[str, Any]:
        text = tokenizer.decode(choice.token_ids)
        return {"type": "text", "text": text} if self._call is None else self._tool_use({self._call.argument: text})

    def _tool_use(self, arguments: dict[str, str]) -> dict[str, Any]:
        assert self._call is not None
        return {
            "type": "tool_use",
            "id": f"toolu_{self._reply.reply_id}",
            "name": self._call.name,
            "input": arguments,
        }

    def _stop_reason(self, finished: Finished) -> str:
        if finished.reason == "length":
            return "max_tokens"
        return "end_turn" if self._call is None else "tool_use"

    def _usage(self) -> dict[str, int]:
        """Anthropic counts cached tokens apart from the others."""
        counts = self._reply.usage()
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "output_tokens": counts["completion_tokens"],
        }


def _event(kind: str, **members: Any) -> bytes:
    return answers.named_sse(kind, {"type": kind, **members})
