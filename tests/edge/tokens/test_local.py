"""Our own tokenizer: what runs where, what is refused, and that it stops trusting itself at the first wrong answer."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvrelay.core.model.prompt import TokenIds
from kvrelay.edge.gateway.openai import TextPrompt, Unscored, read_body
from kvrelay.edge.system.sections import TokensSection
from kvrelay.edge.tokens import local as local_module
from kvrelay.edge.tokens.local import LocalTokenizer, local_tokenizer
from kvrelay.edge.tokens.segments import encode_whole
from kvrelay.edge.tokens.service import MAX_PROMPT_BYTES, CannotTokenize, TokenService
from kvrelay.edge.tokens.template import ChatTemplate
from tests.edge.tokens import chats
from tests.edge.tokens.families import CHATML, byte_level

MIB = 2**20


def made(**options: Any) -> LocalTokenizer:
    template = ChatTemplate(options.pop("template", CHATML), {})
    return LocalTokenizer(byte_level(), template, cache_bytes=options.pop("cache_bytes", MIB))


def text_prompt(text: str) -> TextPrompt:
    found = read_body("/v1/completions", msgspec.json.encode({"prompt": text})).prompt
    assert isinstance(found, TextPrompt)
    return found


def user(text: str) -> TextPrompt:
    return chats.prompt_of(messages=[{"role": "user", "content": text}])


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[UNK]": 0, "<s>": 1, "user": 2, "hello": 3, "there": 4}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.enable_truncation(max_length=2)
    file = tmp_path / "tokenizer.json"
    words.save(str(file))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    (tmp_path / "template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %} {{ m.role }} {{ m.content }}{% endfor %}"
    )
    return file


async def test_a_tokenizer_file_and_a_template_are_all_it_needs(tokenizer_file: Path) -> None:
    section = TokensSection(tokenizer=tokenizer_file, template=tokenizer_file.with_name("template.jinja"))
    tokenizer = local_tokenizer(section, cache_bytes=MIB)
    assert (await tokenizer.token_ids(text_prompt("hello there"), None)).tolist() == [3, 4]
    assert (await tokenizer.token_ids(user("hello there"), None)).tolist() == [1, 2, 3, 4]  # not shortened to 2
    assert tokenizer.why == "the tokenizer has no special tokens to cut at"
    tokenizer.close()


async def test_without_a_template_chats_are_not_guessed_at(tokenizer_file: Path) -> None:
    tokenizer = local_tokenizer(TokensSection(tokenizer=tokenizer_file), cache_bytes=MIB)
    with pytest.raises(CannotTokenize, match="no_chat_template"):
        await tokenizer.token_ids(user("hello"), None)
    tokenizer.close()


def test_files_that_are_no_tokenizer_or_no_template_are_said_at_the_start(tokenizer_file: Path) -> None:
    template = tokenizer_file.with_name("template.jinja")
    template.write_text("{% for %}")
    with pytest.raises(ValueError, match="not a chat template"):
        local_tokenizer(TokensSection(tokenizer=tokenizer_file, template=template), cache_bytes=MIB)
    tokenizer_file.write_text("{}")
    with pytest.raises(ValueError, match=r"not a tokenizer\.json"):
        local_tokenizer(TokensSection(tokenizer=tokenizer_file), cache_bytes=MIB)


async def test_a_tokenizer_that_fails_is_a_reason(tokenizer_file: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    narrow = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}))
    narrow.add_special_tokens(["<s>"])
    narrow.save(str(tokenizer_file))
    with pytest.raises(CannotTokenize, match="tokenizer_failed"):
        local_tokenizer(TokensSection(tokenizer=tokenizer_file), cache_bytes=0).encode(text_prompt("unknown"))
    tokenizer = local_tokenizer(TokensSection(tokenizer=tokenizer_file), cache_bytes=MIB)
    assert tokenizer.why is not None and tokenizer.why.startswith("the tokenizer fails at a text of the self-check: ")
    tokenizer.close()


# --- what runs where -------------------------------------------------------------------------------------------------


async def test_small_and_mostly_known_prompts_need_no_thread() -> None:
    tokenizer = made()
    known, new = "known " * 300, "new words " * 200
    assert tokenizer.at_once(user(known)) is None
    ids = await tokenizer.token_ids(user(known), None)
    found = tokenizer.at_once(user(known))
    assert found is not None and np.array_equal(found, ids)
    assert tokenizer.at_once(user("short")) is not None
    assert tokenizer.at_once(user(new)) is None
    large = user("known " * 3000)
    await tokenizer.token_ids(large, None)
    assert tokenizer.at_once(large) is None
    tokenizer.close()


async def test_what_cannot_be_done_at_once_gets_its_reason_later() -> None:
    tokenizer = made()
    service = TokenService(tokenizer, cache_bytes=MIB)
    for prompt, because in (
        (chats.prompt_of(messages=[{"role": "user", "content": [{"type": "file"}]}]), "content_part_not_text"),
        (TextPrompt(b'"\\ud800"', {"prompt": "a\ud800"}, is_chat=False), "invalid_text"),
        (TextPrompt(b"x" * (MAX_PROMPT_BYTES + 1), {"prompt": ""}, is_chat=False), "prompt_too_large"),
    ):
        assert service.at_once(prompt, None) is None
        assert await service.token_ids(prompt, None) == Unscored(because)
    service.close()


async def test_a_long_text_holds_up_neither_the_loop_nor_a_short_one() -> None:
    tokenizer = made(cache_bytes=0)
    began_s = last_s = time.monotonic()
    long = asyncio.create_task(tokenizer.token_ids(text_prompt("many different words " * 60_000), None))
    short = asyncio.create_task(tokenizer.token_ids(text_prompt("short"), None))
    worst_s = 0.0
    while not long.done():
        await asyncio.sleep(0.001)
        now_s = time.monotonic()
        worst_s, last_s = max(worst_s, now_s - last_s), now_s
    assert short.done(), "it waited for the long one"
    assert len(await long) > 60_000
    assert worst_s < (last_s - began_s) / 3, (worst_s, last_s - began_s)
    tokenizer.close()


# --- trust -----------------------------------------------------------------------------------------------------------


async def test_one_prompt_in_a_thousand_is_encoded_whole_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_module, "SAMPLE_EVERY", 10)
    tokenizer = made()
    for number in range(40):
        prompt = user(f"hi {number}")
        if tokenizer.at_once(prompt) is None:
            await tokenizer.token_ids(prompt, None)
    about = tokenizer.describe()
    assert about["samples"] == 4 and about["cache"] == "on" and about["why"] is None
    tokenizer.close()


async def test_a_wrong_sample_turns_the_cache_off_and_forgets_its_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(local_module, "SAMPLE_EVERY", 3)
    tokenizer = made()
    service = TokenService(tokenizer, cache_bytes=MIB)
    prompt = text_prompt("one <|im_end|> two")
    right = encode_whole(byte_level(), "one <|im_end|> two", framed=True).tolist()
    await service.token_ids(prompt, None)
    assert tokenizer.segments is not None
    tokenizer.segments.cache.get = _seven  # type: ignore[method-assign]
    wrong = await service.token_ids(text_prompt("one <|im_end|> two "), None)
    assert not isinstance(wrong, Unscored) and wrong.token_ids.tolist() != right
    with caplog.at_level(logging.ERROR):
        assert service.at_once(text_prompt("one <|im_end|> two  "), None) is None  # the sample is not for the loop
        sampled = await service.token_ids(text_prompt("one <|im_end|> two  "), None)
    whole = encode_whole(byte_level(), "one <|im_end|> two  ", framed=True)
    assert not isinstance(sampled, Unscored) and np.array_equal(sampled.token_ids, whole)
    about = tokenizer.describe()
    assert about["cache"] == "off" and about["why"].startswith("a sample got other token ids whole than in segments")
    assert "the segment cache is off" in caplog.text and "one" not in caplog.text.partition("segments")[2]
    assert service.at_once(text_prompt("one <|im_end|> two "), None) is None  # the wrong answer is not given again
    again = await service.token_ids(prompt, None)
    assert not isinstance(again, Unscored) and again.token_ids.tolist() == right
    assert tokenizer.lookups()[1] > 0
    service.close()


def _seven(key: bytes) -> TokenIds:
    return np.array([7], dtype=np.uint32)


def test_a_template_that_writes_the_time_is_not_answered_from_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    timeless, timely = made(), made(template="{{ strftime_now('%H:%M') }}{{ messages[0].content }}")
    before = timeless.revision, timely.revision
    monkeypatch.setattr(local_module.time, "time", lambda: time.monotonic() + 4e9)
    assert timeless.revision == before[0] and timely.revision != before[1]
    for tokenizer in (timeless, timely):
        tokenizer.close()


def test_no_memory_no_cache() -> None:
    tokenizer = made(cache_bytes=0)
    assert tokenizer.describe()["why"] == "`tokens.cache_mb` is 0"
    tokenizer.close()
