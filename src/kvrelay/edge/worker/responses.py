"""/v1/responses, nothing being stored: a conversation in an input member, and events with names of their own."""

from __future__ import annotations

from functools import partial
from typing import Any

from msgspec import Struct

from kvrelay.core.engine.engine import Finished
from kvrelay.edge.worker import answers, tokenizer, toolcall
from kvrelay.edge.worker.answers import RequestError
from kvrelay.edge.worker.dialect import Choice
from kvrelay.edge.worker.generation import Generation, chat_tokens, decode_body, limit_or_natural, make_generation
from kvrelay.edge.worker.reply import Reply
from kvrelay.edge.worker.spec import MockSpec
from kvrelay.edge.worker.tokenizer import ChatMessage, TextPart
from kvrelay.edge.worker.toolcall import ToolCall, forced_call

TEXT_PARTS = ("input_text", "output_text", "text")


class _Item(Struct):
    """One item of the input: a message, a call, or what a call brought."""

    type: str = "message"
    role: str = "user"
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    arguments: str | None = None
    call_id: str | None = None
    output: str | None = None


class _Body(Struct):
    input: str | list[_Item]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    previous_response_id: str | None = None
    cache_salt: str | None = None


def read(body: bytes, spec: MockSpec) -> Generation:
    received = decode_body(body, _Body)
    if received.previous_response_id is not None:
        message = f"Response with id '{received.previous_response_id}' not found: nothing is stored."
        raise RequestError(404, message, param="previous_response_id")
    named = received.tool_choice.get("name") if isinstance(received.tool_choice, dict) else None
    call = forced_call(received.tools, named=named, required=received.tool_choice == "required")
    return make_generation(
        dialect=partial(ResponsesDialect, received=received, call=call),
        id_prefix="resp_",
        spec=spec,
        model=received.model,
        prompts=(chat_tokens(_messages(received), tools=received.tools),),
        limit=limit_or_natural(received.max_output_tokens, spec),
        salt=received.cache_salt,
        stream=received.stream,
    )


def _messages(received: _Body) -> list[ChatMessage]:
    messages = [] if received.instructions is None else [ChatMessage("system", received.instructions)]
    if isinstance(received.input, str):
        return [*messages, ChatMessage("user", received.input)]
    return messages + [_message(item) for item in received.input]


def _message(item: _Item) -> ChatMessage:
    match item.type:
        case "message":
            return ChatMessage(item.role, _content(item.content))
        case "function_call":
            return ChatMessage("assistant", tool_calls=[{"name": item.name, "arguments": item.arguments}])
        case "function_call_output":
            return ChatMessage("tool", item.output)
    raise RequestError(400, f"input items of type `{item.type}` are not supported", param="input")


def _content(received: str | list[dict[str, Any]] | None) -> str | list[TextPart] | None:
    if not isinstance(received, list):
        return received
    return [_part(part) for part in received]


def _part(part: dict[str, Any]) -> TextPart:
    kind = str(part.get("type"))
    if kind in TEXT_PARTS:
        return TextPart("text", str(part.get("text", "")))
    if kind == "input_image":
        return TextPart("image_url", image_url=str(part.get("image_url", "")))
    raise RequestError(400, f"content parts of type `{kind}` are not supported", param="input")


class ResponsesDialect:
    """One item of output: a message with one text, or one call."""

    def __init__(self, reply: Reply, *, received: _Body, call: ToolCall | None) -> None:
        self._reply = reply
        self._received = received
        self._call = call
        self._item_id = ("msg_" if call is None else "fc_") + reply.reply_id
        self._events = 0

    def whole(self) -> dict[str, Any]:
        (choice,) = self._reply.choices.values()
        assert choice.finished is not None
        cut = choice.finished.reason == "length"
        return self._response(
            status="incomplete" if cut else "completed",
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            output=[self._item(choice, status="incomplete" if cut else "completed")],
            usage=self._usage(),
        )

    def opening(self) -> bytes:
        response = self._response(status="in_progress", incomplete_details=None, output=[], usage=None)
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def first(self, choice: Choice) -> bytes:
        item = self._empty_item()
        added = self._event("response.output_item.added", output_index=0, item=item)
        if self._call is not None:
            return added
        return added + self._part_event("response.content_part.added", part=_text_part(""))

    def token(self, choice: Choice, finished: Finished | None) -> bytes:
        piece = chr(choice.token_ids[-1])
        if self._call is not None:
            before = self._call.before if len(choice.token_ids) == 1 else ""
            after = "" if finished is None else toolcall.AFTER
            return self._event(
                "response.function_call_arguments.delta",
                item_id=self._item_id,
                output_index=0,
                delta=before + piece + after,
            )
        return self._part_event("response.output_text.delta", delta=piece, logprobs=[])

    def closing(self) -> bytes:
        (choice,) = self._reply.choices.values()
        response = self.whole() | {"kvrelay_mock": self._reply.mark()}
        (item,) = response["output"]
        if self._call is not None:
            done = self._event(
                "response.function_call_arguments.done",
                item_id=self._item_id,
                output_index=0,
                name=self._call.name,
                arguments=item["arguments"],
            )
        else:
            text = tokenizer.decode(choice.token_ids)
            done = self._part_event("response.output_text.done", text=text, logprobs=[])
            done += self._part_event("response.content_part.done", part=_text_part(text))
        done += self._event("response.output_item.done", output_index=0, item=item)
        return done + self._event(f"response.{response['status']}", response=response)

    def _response(self, **members: Any) -> dict[str, Any]:
        received = self._received
        return {
            "id": self._reply.reply_id,
            "object": "response",
            "created_at": self._reply.created_s,
            "model": self._reply.generation.model,
            "instructions": received.instructions,
            "max_output_tokens": received.max_output_tokens,
            "metadata": None,
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "top_p": 1.0,
            "tool_choice": received.tool_choice or "auto",
            "tools": received.tools or [],
            "error": None,
            **members,
        }

    def _item(self, choice: Choice, *, status: str) -> dict[str, Any]:
        text = tokenizer.decode(choice.token_ids)
        if self._call is None:
            return {**self._empty_item(), "status": status, "content": [_text_part(text)]}
        arguments = self._call.before + text + toolcall.AFTER
        return {**self._empty_item(), "status": status, "arguments": arguments}

    def _empty_item(self) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id, "status": "in_progress"}
        if self._call is None:
            return item | {"type": "message", "role": "assistant", "content": []}
        call_id = f"call_{self._reply.reply_id}"
        return item | {"type": "function_call", "call_id": call_id, "name": self._call.name, "arguments": ""}

    def _usage(self) -> dict[str, Any]:
        counts = self._reply.usage()
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
        }

    def _part_event(self, kind: str, **members: Any) -> bytes:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **members)

    def _event(self, kind: str, **members: Any) -> bytes:
        number, self._events = self._events, self._events + 1
        return answers.named_sse(kind, {"type": kind, "sequence_number": number, **members})


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
