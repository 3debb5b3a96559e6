"""The answer to one generation: collects or streams what the engine makes, in the dialect of the API that was used.

`WholeReply` and `StreamReply` have the same outline. Faults that strike in the middle of an answer (hang, die) act
here, because only here chunks are counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from kvrelay.core.engine.engine import Finished
from kvrelay.edge.http.server import Exchange
from kvrelay.edge.worker import answers
from kvrelay.edge.worker.answers import STREAM_HEADERS
from kvrelay.edge.worker.dialect import Choice
from kvrelay.edge.worker.generation import Generation


class MidFault(Struct, frozen=True):
    """What goes wrong after some chunks; `die` does not return to the caller's world for long."""

    hang_after_chunks: int | None = None
    die_after_chunks: int | None = None
    die: Callable[[], None] | None = None


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
        self.created_s = int(time.time())
        self.tell_load: Callable[[int], dict[str, Any] | None] = lambda cached_tokens: None  # called once, at the end
        self._load_told: dict[str, Any] | None = None
        self._dialect = generation.dialect(self)
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
            usage = self.usage()["prompt_tokens_details"]
            self._load_told = self.tell_load(usage["cached_tokens"])
            self._end()

    def usage(self) -> dict[str, Any]:
        """A prompt counts once, however many samples it has."""
        finished = [(choice, choice.finished) for choice in self.choices.values() if choice.finished is not None]
        samples = self.generation.choices_per_prompt
        firsts = [end for choice, end in finished if choice.index % samples == 0]
        return answers.usage(
            prompt_tokens=sum(end.prompt_tokens for end in firsts),
            completion_tokens=sum(end.output_tokens for _, end in finished),
            cached_tokens=sum(end.cached_tokens for end in firsts),
        )

    def kv_member(self) -> dict[str, Any]:
        """As the engine's KV connector adds it to an answer that is not streamed."""
        return {} if self._load_told is None else {"kv_transfer_params": {"kvrelay": self._load_told}}

    def mark(self) -> dict[str, Any]:
        ends = [choice.finished for choice in self.choices.values() if choice.finished is not None]
        return answers.mock_mark(self._incarnation, sum(end.wrong_reuse_blocks for end in ends))

    def prompt_ids(self, choice: Choice) -> list[int]:
        ids: list[int] = self.generation.prompts[choice.prompt_index].tolist()
        return ids

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
        if not self._held_back:
            body = self._dialect.whole() | self.kv_member() | {"kvrelay_mock": self.mark()}
            answers.respond_json(self.exchange, body)


class StreamReply(Reply):
    """Server-sent events. The head goes out at once, as in the engine: 200 is seen before the first token exists."""

    def begin(self) -> None:
        self.exchange.start(200, STREAM_HEADERS, self._dialect.opening())

    def on_token(self, request_id: str, token_id: int) -> None:
        choice = self.choices[request_id]
        choice.token_ids.append(token_id)
        if len(choice.token_ids) == 1:
            self.exchange.write(self._dialect.first(choice))
        if len(choice.token_ids) < choice.max_tokens:  # the last token leaves together with its reason
            self._write_token(choice, None)

    def _end_choice(self, choice: Choice, finished: Finished) -> None:
        self._write_token(choice, finished)

    def _end(self) -> None:
        if self._chunk_allowed():
            self.exchange.write(self._dialect.closing())
            self.exchange.finish()

    def _write_token(self, choice: Choice, finished: Finished | None) -> None:
        if self._chunk_allowed():
            self.exchange.write(self._dialect.token(choice, finished))
