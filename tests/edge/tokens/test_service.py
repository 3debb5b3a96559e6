"""Text to token ids: asked once, bounded, never a reason to fail."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvrelay.core.contract.keys import Keyer
from kvrelay.core.model.prompt import TokenIds
from kvrelay.edge.gateway.openai import TextPrompt, Unscored
from kvrelay.edge.tokens.service import CannotTokenize, KnownTokens, TokenService
from tests.edge.gateway.scripted import ScriptedWorker, client_of, receipts, running

TEXT = TextPrompt(b'"hello"', {"prompt": "hello"}, is_chat=False)


class Scripted:
    def __init__(self, *, delay_s: float = 0.0, error: str | None = None) -> None:
        self.asked = 0
        self.revision = 0
        self.known: TokenIds | None = None
        self._delay_s = delay_s
        self._error = error

    async def token_ids(self, prompt: TextPrompt, model: str | None) -> TokenIds:
        self.asked += 1
        await asyncio.sleep(self._delay_s)
        if self._error:
            raise CannotTokenize(self._error)
        return np.arange(3, dtype=np.uint32)

    def at_once(self, prompt: TextPrompt) -> TokenIds | None:
        return self.known

    def describe(self) -> Mapping[str, Any]:
        return {}

    def close(self) -> None:
        return


async def test_a_text_is_asked_for_once_per_model() -> None:
    tokenizer = Scripted()
    service = TokenService(tokenizer, cache_bytes=2**20)
    assert service.at_once(TEXT, "m") is None
    await service.token_ids(TEXT, "m")
    found = service.at_once(TEXT, "m")
    assert isinstance(found, KnownTokens) and found.token_ids.tolist() == [0, 1, 2]
    assert service.at_once(TEXT, "other") is None


async def test_ids_of_another_revision_are_not_used() -> None:
    tokenizer = Scripted()
    service = TokenService(tokenizer, cache_bytes=2**20)
    await service.token_ids(TEXT, None)
    assert service.at_once(TEXT, None) is not None
    tokenizer.revision += 1
    assert service.at_once(TEXT, None) is None


async def test_what_the_tokenizer_has_at_once_needs_no_question() -> None:
    tokenizer = Scripted()
    tokenizer.known = np.array([7], dtype=np.uint32)
    found = TokenService(tokenizer, cache_bytes=2**20).at_once(TEXT, None)
    assert isinstance(found, KnownTokens) and found.token_ids is tokenizer.known and tokenizer.asked == 0


async def test_failures_and_delays_are_reasons_and_are_not_cached() -> None:
    for tokenizer, because in ((Scripted(delay_s=1), "tokenizer_too_slow"), (Scripted(error="no"), "no")):
        service = TokenService(tokenizer, cache_bytes=2**20, deadline_s=0.02)
        assert await service.token_ids(TEXT, None) == Unscored(because)
        assert service.at_once(TEXT, None) is None


async def test_too_many_questions_at_once_are_not_queued() -> None:
    service = TokenService(Scripted(delay_s=0.05), cache_bytes=2**20)
    answers = await asyncio.gather(*(service.token_ids(TEXT, str(number)) for number in range(70)))
    assert sum(isinstance(answer, Unscored) and answer.because == "tokenizer_busy" for answer in answers) == 6


async def test_the_workers_own_tokenizer_is_asked_for_text_and_only_once() -> None:
    worker = ScriptedWorker("a")
    async with running(worker) as gateway, client_of(gateway) as client:
        chat: dict[str, object] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
        for _ in range(2):
            assert (await client.post(chat, "/v1/chat/completions"))[0] == 200
        assert worker.tokenized == [{"model": "m", "messages": [{"role": "user", "content": "hi"}]}]
        assert [receipt.eligible_prefix_tokens for receipt in receipts(gateway)] == [32, 32]


def test_block_keys_of_a_known_text_are_made_once_per_tag() -> None:
    keyer, known = Keyer(b"seed"), KnownTokens(np.arange(40, dtype=np.uint32))
    plain = known.keys(keyer, 16, adapter=None, salt=None)
    assert plain is known.keys(keyer, 16, adapter=None, salt=None)
    assert plain.tolist() == keyer.prompt_keys(known.token_ids, 16).tolist()
    for salt in ("a", "b", "c", "d", "e"):
        salted = known.keys(keyer, 16, adapter=None, salt=salt)
        assert salted.tolist() == keyer.prompt_keys(known.token_ids, 16, salt=salt).tolist() != plain.tolist()
