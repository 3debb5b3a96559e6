"""/v1/completions: the body as it comes and the answer as vLLM writes it. `SseDialect` is shared with chats."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from msgspec import Struct

from kvrelay.core.engine.engine import Finished
from kvrelay.edge.worker import answers, tokenizer
from kvrelay.edge.worker.answers import STREAM_END
from kvrelay.edge.worker.dialect import Choice
from kvrelay.edge.worker.generation import Generation, Limit, decode_body, make_generation, read_prompts
from kvrelay.edge.worker.reply import Reply
from kvrelay.edge.worker.spec import MockSpec

DEFAULT_TOKENS = 16


class StreamOptions(Struct):
    include_usage: bool = False


class Sampling(Struct, kw_only=True):
    """Members that both OpenAI bodies have."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    return_token_ids: bool | None = None
    cache_salt: str | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class _Body(Sampling, kw_only=True):
    prompt: Any = None


def read(body: bytes, spec: MockSpec) -> Generation:
    received = decode_body(body, _Body)
    return make_generation(
        dialect=partial(
            CompletionDialect,
            include_usage=received.include_usage,
            return_token_ids=bool(received.return_token_ids),
        ),
        id_prefix="cmpl-",
        spec=spec,
        model=received.model,
        prompts=read_prompts(received.prompt),
        limit=Limit(DEFAULT_TOKENS if received.max_tokens is None else received.max_tokens, natural=False),
        n=received.n,
        salt=received.cache_salt,
        stream=received.stream,
    )


class SseDialect:
    """One event per token, the reason in the last one of a choice, usage (if asked for) in an event of its own."""

    whole_kind: str
    chunk_kind: str

    def __init__(self, reply: Reply, *, include_usage: bool, return_token_ids: bool) -> None:
        self.reply = reply
        self.return_token_ids = return_token_ids
        self._include_usage = include_usage
        self._head = b"data: " + msgspec.json.encode(self.envelope(self.chunk_kind))[:-1] + b',"choices":[{"index":'

    def envelope(self, kind: str) -> dict[str, Any]:
        reply = self.reply
        return {"id": reply.reply_id, "object": kind, "created": reply.created_s, "model": reply.generation.model}

    def whole(self) -> dict[str, Any]:
        body = self.envelope(self.whole_kind)
        body["choices"] = [self._choice_body(choice) for choice in self.reply.choices.values()]
        return body | {"usage": self.reply.usage()}

    def opening(self) -> bytes:
        return b""

    def first(self, choice: Choice) -> bytes:
        return b""

    def token(self, choice: Choice, finished: Finished | None) -> bytes:
        """By hand rather than through an encoder: this is the one thing that happens once per token and request."""
        token_id = choice.token_ids[-1]
        ids = self.ids_member(choice, token_id)
        reason, mark = b"null", b""
        if finished is not None:
            reason = b'"' + self.reason(finished).encode() + b'"'
            mark = b',"kvrelay_mock":' + msgspec.json.encode(self.reply.mark())
        tail = b',"logprobs":null,"finish_reason":%b,"stop_reason":null%b}]%b}\n\n' % (reason, ids, mark)
        return self._head + b"%d," % choice.index + self.delta(choice, token_id, last=finished is not None) + tail

    def closing(self) -> bytes:
        if not self._include_usage:
            return STREAM_END
        reply = self.reply
        body = self.envelope(self.chunk_kind) | {"choices": [], "usage": reply.usage(), "kvrelay_mock": reply.mark()}
        return answers.sse(body) + STREAM_END

    def event(self, choice: Choice, delta: bytes) -> bytes:
        """An event that carries no token."""
        return self._head + b'%d,%b,"logprobs":null,"finish_reason":null}]}\n\n' % (choice.index, delta)

    def ids_member(self, choice: Choice, token_id: int) -> bytes:
        """As the engine does, the member is there in any case."""
        return b',"token_ids":[%d]' % token_id if self.return_token_ids else b',"token_ids":null'

    def delta(self, choice: Choice, token_id: int, *, last: bool) -> bytes:
        """The member with the text of one token."""
        raise NotImplementedError

    def text_member(self, choice: Choice) -> dict[str, Any]:
        """The same for a whole answer."""
        raise NotImplementedError

    def reason(self, finished: Finished) -> str:
        return finished.reason

    def _choice_body(self, choice: Choice) -> dict[str, Any]:
        assert choice.finished is not None
        body: dict[str, Any] = {"index": choice.index, **self.text_member(choice)}
        body |= {"logprobs": None, "finish_reason": self.reason(choice.finished), "stop_reason": None}
        if self.return_token_ids:
            body["token_ids"] = choice.token_ids
        return body


class CompletionDialect(SseDialect):
    whole_kind = chunk_kind = "text_completion"

    def ids_member(self, choice: Choice, token_id: int) -> bytes:
        """The prompt's ids come with the first token."""
        prompt_ids = b"null"
        if self.return_token_ids and len(choice.token_ids) == 1:
            prompt_ids = msgspec.json.encode(self.reply.prompt_ids(choice))
        return b',"prompt_token_ids":%b' % prompt_ids + super().ids_member(choice, token_id)

    def delta(self, choice: Choice, token_id: int, *, last: bool) -> bytes:
        return b'"text":"%c"' % token_id

    def text_member(self, choice: Choice) -> dict[str, Any]:
        prompt_ids = {"prompt_token_ids": self.reply.prompt_ids(choice)} if self.return_token_ids else {}
        return {"text": tokenizer.decode(choice.token_ids), **prompt_ids}
