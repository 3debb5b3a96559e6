"""Text to token ids: asked once, bounded, never a reason to fail."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from kvrelay.core.model.prompt import TokenIds
from kvrelay.edge.gateway.openai import TextPrompt, Unscored, read_body
from kvrelay.edge.gateway.tokenize import CannotTokenize, TokenCache, TokenService, local_tokenizer
from kvrelay.edge.system.sections import TokensSection
from tests.edge.gateway.scripted import ScriptedWorker, client_of, receipts, running

TEXT = TextPrompt(b'"hello"', {"prompt": "hello"}, is_chat=False)


class Scripted:
    def __init__(self, *, delay_s: float = 0.0, error: str | None = None) -> None:
        self.asked = 0
        self._delay_s = delay_s
        self._error = error

    async def token_ids(self, prompt: TextPrompt, model: str | None) -> TokenIds:
        self.asked += 1
        await asyncio.sleep(self._delay_s)
        if self._error:
            raise CannotTokenize(self._error)
        return np.arange(3, dtype=np.uint32)

    def close(self) -> None:
        return


async def test_a_text_is_asked_for_once_per_model() -> None:
    tokenizer = Scripted()
    service = TokenService(tokenizer, cache_mb=1)
    assert service.cached(TEXT, "m") is None
    await service.token_ids(TEXT, "m")
    found = service.cached(TEXT, "m")
    assert found is not None and found.tolist() == [0, 1, 2]
    assert service.cached(TEXT, "other") is None


async def test_failures_and_delays_are_reasons_and_are_not_cached() -> None:
    for tokenizer, because in ((Scripted(delay_s=1), "tokenizer_too_slow"), (Scripted(error="no"), "no")):
        service = TokenService(tokenizer, cache_mb=1, deadline_s=0.02)
        assert await service.token_ids(TEXT, None) == Unscored(because)
        assert service.cached(TEXT, None) is None


async def test_too_many_questions_at_once_are_not_queued() -> None:
    service = TokenService(Scripted(delay_s=0.05), cache_mb=1)
    answers = await asyncio.gather(*(service.token_ids(TEXT, str(number)) for number in range(70)))
    assert sum(isinstance(answer, Unscored) and answer.because == "tokenizer_busy" for answer in answers) == 6


def test_the_cache_forgets_the_oldest_within_its_bytes() -> None:
    cache = TokenCache(max_bytes=3 * (400 + TokenCache.ENTRY_OVERHEAD_BYTES))
    ids = np.zeros(100, dtype=np.uint32)
    for key in (b"a", b"b", b"c"):
        cache.put(key, ids)
    cache.get(b"a")
    cache.put(b"d", ids)
    assert [key for key in (b"a", b"b", b"c", b"d") if cache.get(key) is not None] == [b"a", b"c", b"d"]
    cache.put(b"huge", np.zeros(10_000, dtype=np.uint32))
    assert cache.get(b"huge") is None and cache.get(b"d") is not None


async def test_the_workers_own_tokenizer_is_asked_for_text_and_only_once() -> None:
    worker = ScriptedWorker("a")
    async with running(worker) as gateway, client_of(gateway) as client:
        chat: dict[str, object] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
        for _ in range(2):
            assert (await client.post(chat, "/v1/chat/completions"))[0] == 200
        assert worker.tokenized == [{"model": "m", "messages": [{"role": "user", "content": "hi"}]}]
        assert [receipt.eligible_prefix_tokens for receipt in receipts(gateway)] == [32, 32]


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 0, "<s>": 1, "user": 2, "hello": 3, "there": 4}, unk_token="[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    file = tmp_path / "tokenizer.json"
    words.save(str(file))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    (tmp_path / "template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %} {{ m.role }} {{ m.content }}{% endfor %}"
    )
    return file


async def test_a_local_tokenizer_renders_and_encodes(tokenizer_file: Path) -> None:
    section = TokensSection(tokenizer=tokenizer_file, template=tokenizer_file.with_name("template.jinja"))
    tokenizer = local_tokenizer(section)
    text = read_body("/v1/completions", b'{"prompt":"hello there"}').prompt
    chat = read_body("/v1/chat/completions", b'{"messages":[{"role":"user","content":"hello"}]}').prompt
    assert isinstance(text, TextPrompt) and isinstance(chat, TextPrompt)
    assert (await tokenizer.token_ids(text, None)).tolist() == [3, 4]
    assert (await tokenizer.token_ids(chat, None)).tolist() == [1, 2, 3]
    tokenizer.close()


async def test_without_a_template_chats_are_not_guessed_at(tokenizer_file: Path) -> None:
    tokenizer = local_tokenizer(TokensSection(tokenizer=tokenizer_file))
    with pytest.raises(CannotTokenize, match="no_chat_template"):
        await tokenizer.token_ids(TextPrompt(b"", {"messages": b"[]"}, is_chat=True), None)
    tokenizer.close()


def test_a_file_that_is_no_tokenizer_is_said_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    with pytest.raises(ValueError, match="not a tokenizer"):
        local_tokenizer(TokensSection(tokenizer=file))
