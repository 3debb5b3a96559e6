"""/v1/chat/completions, and what /tokenize makes of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from kvrelay.core.engine.engine import Finished
from kvrelay.core.model.prompt import TokenIds
from kvrelay.edge.worker import tokenizer, toolcall
from kvrelay.edge.worker.answers import RequestError
from kvrelay.edge.worker.completions import Sampling, SseDialect
from kvrelay.edge.worker.dialect import Choice
from kvrelay.edge.worker.generation import (
    Generation,
    Limit,
    chat_tokens,
    decode_body,
    limit_or_natural,
    make_generation,
)
from kvrelay.edge.worker.reply import Reply
from kvrelay.edge.worker.spec import MockSpec
from kvrelay.edge.worker.tokenizer import ChatMessage
from kvrelay.edge.worker.toolcall import ToolCall, forced_call


class _Body(Sampling, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[Any] | None = None
    tool_choice: Any = None


def read(body: bytes, spec: MockSpec) -> Generation:
    received = decode_body(body, _Body)
    prompt = chat_tokens(
        received.messages,
        add_generation_prompt=received.add_generation_prompt,
        continue_final_message=received.continue_final_message,
        tools=received.tools,
    )
    return make_generation(
        dialect=partial(
            ChatDialect,
            include_usage=received.include_usage,
            return_token_ids=bool(received.return_token_ids),
            call=_call(received),
        ),
        id_prefix="chatcmpl-",
        spec=spec,
        model=received.model,
        prompts=(prompt,),
        limit=_limit(received, spec),
        n=received.n,
        salt=received.cache_salt,
        stream=received.stream,
    )


def _limit(received: _Body, spec: MockSpec) -> Limit:
    asked = received.max_tokens if received.max_completion_tokens is None else received.max_completion_tokens
    if asked is None and received.ignore_eos:
        return Limit(spec.context_tokens, natural=False)
    if asked is None and received.continue_final_message:  # what is there counts as a part of the reply
        said = len(tokenizer.encode(tokenizer.content_text(received.messages[-1])))
        return Limit(max(1, spec.reply_tokens - said), natural=True)
    return limit_or_natural(asked, spec)


def _call(received: _Body) -> ToolCall | None:
    choice = received.tool_choice
    named = choice["function"]["name"] if _names_function(choice) else None
    return forced_call(received.tools, named=named, required=choice == "required")


def _names_function(choice: Any) -> bool:
    return isinstance(choice, dict) and isinstance(choice.get("function"), dict) and "name" in choice["function"]


def read_tokenize(received: Mapping[str, Any]) -> TokenIds:
    """The body of /tokenize: `prompt` or `messages`."""
    if isinstance(received.get("prompt"), str):
        return tokenizer.encode(received["prompt"])
    try:
        messages = msgspec.convert(received.get("messages"), list[ChatMessage])
        tools = msgspec.convert(received.get("tools"), list[Any] | None)
    except msgspec.ValidationError as error:
        raise RequestError(400, f"`prompt` (a text) or `messages` is needed: {error}") from error
    return chat_tokens(
        messages,
        add_generation_prompt=bool(received.get("add_generation_prompt", True)),
        continue_final_message=bool(received.get("continue_final_message", False)),
        tools=tools,
    )


class ChatDialect(SseDialect):
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, reply: Reply, *, include_usage: bool, return_token_ids: bool, call: ToolCall | None) -> None:
        super().__init__(reply, include_usage=include_usage, return_token_ids=return_token_ids)
        self._call = call

    def whole(self) -> dict[str, Any]:
        body = super().whole()
        if self.return_token_ids:
            body["prompt_token_ids"] = self.reply.prompt_ids(next(iter(self.reply.choices.values())))
        return body

    def first(self, choice: Choice) -> bytes:
        if self._call is None:
            return self._opening_of(choice)
        call = {"index": 0, **self._call_body(choice, arguments="")}
        delta = {"role": "assistant", "content": None, "tool_calls": [call]}
        return self.event(choice, b'"delta":' + msgspec.json.encode(delta))

    def _opening_of(self, choice: Choice) -> bytes:
        """The role, and the prompt's ids beside the choices."""
        event = self.event(choice, b'"delta":{"role":"assistant","content":""}')
        ids = msgspec.json.encode(self.reply.prompt_ids(choice)) if self.return_token_ids else b"null"
        return event.removesuffix(b"}\n\n") + b',"prompt_token_ids":%b}\n\n' % ids

    def delta(self, choice: Choice, token_id: int, *, last: bool) -> bytes:
        if self._call is None:
            return b'"delta":{"content":"%c"}' % token_id
        before = self._call.before if len(choice.token_ids) == 1 else ""
        arguments = before + chr(token_id) + (toolcall.AFTER if last else "")
        call = {"index": 0, "function": {"arguments": arguments}}
        return b'"delta":' + msgspec.json.encode({"tool_calls": [call]})

    def text_member(self, choice: Choice) -> dict[str, Any]:
        text = tokenizer.decode(choice.token_ids)
        if self._call is None:
            return {"message": {"role": "assistant", "content": text}}
        arguments = self._call.before + text + toolcall.AFTER
        calls = [self._call_body(choice, arguments=arguments)]
        return {"message": {"role": "assistant", "content": None, "tool_calls": calls}}

    def reason(self, finished: Finished) -> str:
        return "tool_calls" if self._call is not None and finished.reason == "stop" else finished.reason

    def _call_body(self, choice: Choice, *, arguments: str) -> dict[str, Any]:
        assert self._call is not None
        return {
            "id": f"call_{self.reply.reply_id}-{choice.index}",
            "type": "function",
            "function": {"name": self._call.name, "arguments": arguments},
        }
