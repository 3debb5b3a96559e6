"""The answer to one generation: collects or streams what the engine makes.

`WholeReply` and `StreamReply` have the same outline. Faults that strike in the middle of an answer (hang, die) act
here, because only here chunks are counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from kvrelay.core.engine.engine import Finished
from kvrelay.edge.http.server import Exchange
from kvrelay.edge.worker import answers, tokenizer
from kvrelay.edge.worker.answers import STREAM_END, STREAM_HEADERS
from kvrelay.edge.worker.completions import Generation


class MidFault(Struct, frozen=True):
    """What goes wrong after some chunks; `die` does not return to the caller's world for long."""

    hang_after_chunks: int | None = None
    die_after_chunks: int | None = None
    die: Callable[[], None] | None = None


class Choice:
    """One sample: what the engine has made of it so far."""

    __slots__ = ("finished", "index", "max_tokens", "prompt_index", "token_ids")

    def __init__(self, *, index: int, prompt_index: int, max_tokens: int) -> None:
        self.index = index
        self.prompt_index = prompt_index
        self.max_tokens = max_tokens
        self.token_ids: list[int] = []
        self.finished: Finished | None = None


class Reply:
    """What both kinds of answer share: choices by engine request, usage, the mark, and the faults."""

    def __init__(
        self,
        exchange: Exchange,
        generation: Generation,
        *,
        reply_id: str,
        incarnation: str,
        fault: MidFault,
        on_done: Callable[[], None],
    ) -> None:
        self.exchange = exchange
        self.generation = generation
        self.reply_id = reply_id
        self.choices: dict[str, Choice] = {}
        self._created_s = int(time.time())
        self._incarnation = incarnation
        self._fault = fault
        self._on_done = on_done
        self._chunks = 0

    def add_choice(self, engine_id: str, *, prompt_index: int, max_tokens: int) -> None:
        self.choices[engine_id] = Choice(index=len(self.choices), prompt_index=prompt_index, max_tokens=max_tokens)

    def begin(self) -> None:
        """Everything is with the engine."""
        raise NotImplementedError

    def on_token(self, request_id: str, token_id: int) -> None:
        raise NotImplementedError

    def on_finished(self, finished: Finished) -> None:
        choice = self.choices[finished.request_id]
        choice.finished = finished
        self._end_choice(choice, finished)
        if all(choice.finished is not None for choice in self.choices.values()):
            self._on_done()
            self._end()

    def _end_choice(self, choice: Choice, finished: Finished) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError

    def _chunk_allowed(self) -> bool:
        """Counts one chunk; False when a fault keeps it back."""
        fault, chunks = self._fault, self._chunks
        self._chunks += 1
        if fault.die_after_chunks is not None and chunks >= fault.die_after_chunks:
            if chunks == fault.die_after_chunks and fault.die is not None:
                fault.die()
            return False
        return fault.hang_after_chunks is None or chunks < fault.hang_after_chunks

    def _usage(self) -> dict[str, Any]:
        """A prompt counts once, however many samples it has."""
        finished = [(choice, choice.finished) for choice in self.choices.values() if choice.finished is not None]
        samples = self.generation.choices_per_prompt
        firsts = [end for choice, end in finished if choice.index % samples == 0]
        return answers.usage(
            prompt_tokens=sum(end.prompt_tokens for end in firsts),
            completion_tokens=sum(end.output_tokens for _, end in finished),
            cached_tokens=sum(end.cached_tokens for end in firsts),
        )

    def _mark(self) -> dict[str, Any]:
        ends = [choice.finished for choice in self.choices.values() if choice.finished is not None]
        return answers.mock_mark(self._incarnation, sum(end.wrong_reuse_blocks for end in ends))

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self.reply_id, "object": kind, "created": self._created_s, "model": self.generation.model}

    def _prompt_ids(self, choice: Choice) -> list[int]:
        ids: list[int] = self.generation.prompts[choice.prompt_index].tolist()
        return ids


class WholeReply(Reply):
    """One JSON body when all choices are complete."""

    def begin(self) -> None:
        self._held_back = False

    def on_token(self, request_id: str, token_id: int) -> None:
        self.choices[request_id].token_ids.append(token_id)
        if not self._chunk_allowed():
            self._held_back = True

    def _end_choice(self, choice: Choice, finished: Finished) -> None:
        pass

    def _end(self) -> None:
        if self._held_back:
            return
        chat = self.generation.chat
        body = self._envelope("chat.completion" if chat else "text_completion")
        body["choices"] = [self._choice_body(choice) for choice in self.choices.values()]
        if chat and self.generation.return_token_ids:
            body["prompt_token_ids"] = self._prompt_ids(next(iter(self.choices.values())))
        body["usage"] = self._usage()
        body["kvrelay_mock"] = self._mark()
        answers.respond_json(self.exchange, body)

    def _choice_body(self, choice: Choice) -> dict[str, Any]:
        assert choice.finished is not None
        text = tokenizer.decode(choice.token_ids)
        body: dict[str, Any] = {"index": choice.index}
        if self.generation.chat:
            body["message"] = {"role": "assistant", "content": text}
        else:
            body["text"] = text
        body |= {"logprobs": None, "finish_reason": choice.finished.reason, "stop_reason": None}
        if self.generation.return_token_ids:
            body["token_ids"] = choice.token_ids
            if not self.generation.chat:
                body["prompt_token_ids"] = self._prompt_ids(choice)
        return body


class StreamReply(Reply):
    """Server-sent events: one per token, the reason in the last one of a choice, usage (if asked for) in a last chunk.

    The head goes out at once, as in the engine: a client sees 200 before the first token exists.
    """

    def begin(self) -> None:
        self.exchange.start(200, STREAM_HEADERS)
        kind = "chat.completion.chunk" if self.generation.chat else "text_completion"
        self._head = b"data: " + msgspec.json.encode(self._envelope(kind))[:-1] + b',"choices":[{"index":'

    def on_token(self, request_id: str, token_id: int) -> None:
        choice = self.choices[request_id]
        choice.token_ids.append(token_id)
        if len(choice.token_ids) == 1 and self.generation.chat:
            self._write_role(choice)
        if len(choice.token_ids) < choice.max_tokens:  # the last token leaves together with its reason
            self._write_token(choice, b"null", b"")

    def _end_choice(self, choice: Choice, finished: Finished) -> None:
        mark = b',"kvrelay_mock":' + msgspec.json.encode(self._mark())
        self._write_token(choice, b'"' + finished.reason.encode() + b'"', mark)

    def _end(self) -> None:
        if not self._chunk_allowed():
            return
        if self.generation.include_usage:
            kind = "chat.completion.chunk" if self.generation.chat else "text_completion"
            body = self._envelope(kind) | {"choices": [], "usage": self._usage(), "kvrelay_mock": self._mark()}
            self.exchange.write(answers.sse(body))
        self.exchange.write(STREAM_END)
        self.exchange.finish()

    def _write_role(self, choice: Choice) -> None:
        delta = b'%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
        self.exchange.write(self._head + delta % choice.index)

    def _write_token(self, choice: Choice, reason: bytes, mark: bytes) -> None:
        """By hand rather than through an encoder: this is the one thing that happens once per token and request."""
        if not self._chunk_allowed():
            return
        token_id = choice.token_ids[-1]
        shape = b'%d,"delta":{"content":"%c"}' if self.generation.chat else b'%d,"text":"%c"'
        ids = b',"token_ids":[%d]' % token_id if self.generation.return_token_ids else b""
        tail = b',"logprobs":null,"finish_reason":%b,"stop_reason":null%b}]%b}\n\n' % (reason, ids, mark)
        self.exchange.write(self._head + shape % (choice.index, token_id) + tail)
