"""Cut texts get the ids of whole ones, or the cutting is off and says why."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvrelay.core.model.prompt import TokenIds
from kvrelay.edge.gateway.openai import TextPrompt
from kvrelay.edge.tokens import selfcheck
from kvrelay.edge.tokens.local import LocalTokenizer
from kvrelay.edge.tokens.segments import MAX_CUTS, CannotCut, SegmentTokenizer, Tally, _longest_of, encode_whole
from kvrelay.edge.tokens.template import ChatTemplate
from tests.edge.tokens import chats
from tests.edge.tokens.families import CHATML, FAMILIES, byte_level, metaspace, words

SEED = 20_061


def segmented(tokenizer: Any, max_bytes: int = 2**22) -> SegmentTokenizer:
    return SegmentTokenizer(tokenizer, max_bytes=max_bytes, tally=Tally())


def local(tokenizer: Any, template: str = CHATML, cache_bytes: int = 2**24) -> LocalTokenizer:
    return LocalTokenizer(tokenizer, ChatTemplate(template, {"bos_token": "<s>"}), cache_bytes=cache_bytes)


@pytest.mark.covers("S19", "S21")
@pytest.mark.parametrize("family", FAMILIES)
def test_500_random_chats_with_tools_get_the_ids_of_the_whole_text(family: str) -> None:
    make, source = FAMILIES[family]
    tokenizer, template = make(), ChatTemplate(source, {"bos_token": "<s>"})
    ours = LocalTokenizer(tokenizer, template, cache_bytes=2**24)
    assert ours.why is None
    chance = random.Random(SEED)
    for number in range(500):
        chat = chats.chat(chance)
        turns = [at for at, message in enumerate(chat["messages"], 1) if message["role"] in ("user", "tool")]
        for turn in turns:  # as it grows
            prompt = chats.prompt_of(messages=chat["messages"][:turn], tools=chat["tools"])
            whole = encode_whole(tokenizer, template.render(prompt.payload), framed=False)
            assert np.array_equal(ours.encode(prompt), whole), (family, SEED, number, turn)
    about = ours.describe()
    assert about["cache"] == "on" and about["hit_ratio"] > 0.4
    ours.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_text_prompts_are_framed_as_the_whole_text_is(family: str) -> None:
    tokenizer = FAMILIES[family][0]()
    segments = segmented(tokenizer)
    chance = random.Random(SEED)
    for number in range(300):
        text = chats.text(chance)
        for framed in (True, False):
            whole = encode_whole(tokenizer, text, framed=framed)
            assert np.array_equal(segments.token_ids(text, framed=framed), whole), (family, SEED, number)


def test_the_beginning_of_a_text_is_not_what_it_is_further_within() -> None:
    tokenizer = metaspace()
    segments = segmented(tokenizer)
    for text in ("word</s>word", "word", "</s>word", " word</s> word"):
        assert np.array_equal(segments.token_ids(text, framed=False), encode_whole(tokenizer, text, framed=False))
    assert (
        segments.token_ids("word", framed=False).tolist() != segments.token_ids("</s>word", framed=False).tolist()[1:]
    )


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"lstrip": True}, "takes white space along"),
        ({"rstrip": True}, "takes white space along"),
        ({"single_word": True}, "wants word boundaries"),
        ({"normalized": True}, "is looked for in normalized text"),
    ],
)
def test_special_tokens_that_mind_their_neighbours_turn_it_off(flags: dict[str, bool], why: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = byte_level()
    tokenizer.add_special_tokens([tokenizers.AddedToken("<|odd|>", **{"normalized": False, **flags})])
    ours = local(tokenizer)
    about = ours.describe()
    assert about["cache"] == "off" and about["hit_ratio"] is None
    assert about["why"].startswith("the ") and "`<|odd|>`" in about["why"] and why in about["why"]
    prompt = chats.prompt_of(messages=[{"role": "user", "content": "a <|odd|> b"}])
    text = "<|im_start|>user\na <|odd|> b<|im_end|>\n<|im_start|>assistant\n"
    assert np.array_equal(ours.encode(prompt), encode_whole(tokenizer, text, framed=False))
    ours.close()


def test_added_tokens_that_only_mind_their_own_piece_do_no_harm() -> None:
    """Seen in vocabularies with a token for every run of white space."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = byte_level()
    tokenizer.add_tokens([tokenizers.AddedToken(" " * run, normalized=True) for run in range(2, 9)])
    tokenizer.add_tokens([tokenizers.AddedToken("\n" * run, normalized=False) for run in range(2, 9)])
    tokenizer.add_tokens([tokenizers.AddedToken("<odd", normalized=True, lstrip=True, rstrip=True)])
    tokenizer.add_tokens([tokenizers.AddedToken("x<|im_end|>", normalized=False)])  # covers a special one
    segments = segmented(tokenizer)
    selfcheck.check(segments, tokenizer)
    for text in (
        "x<|im_end|>  \n\n<|im_start|>a",
        "a \n\n\n  <odd <|im_end|>  x",
        "xx<|im_end|>",
        "<odd<|im_end|> <odd",
    ):
        assert np.array_equal(segments.token_ids(text, framed=False), encode_whole(tokenizer, text, framed=False))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda tokenizer: setattr(tokenizer.model, "dropout", 0.5), "draws lots"),
        (lambda tokenizer: setattr(tokenizer, "post_processor", None), None),
    ],
)
def test_what_a_tokenizer_does_besides(spoil: Callable[[Any], None], why: str | None) -> None:
    tokenizer = byte_level()
    spoil(tokenizer)
    ours = local(tokenizer)
    assert (ours.why is None) == (why is None) and (why or "") in (ours.why or "")
    ours.close()


def test_without_special_tokens_there_is_nothing_to_cut_at() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    with pytest.raises(CannotCut, match="no special tokens"):
        segmented(tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")))


def test_the_self_check_finds_a_tokenizer_that_looks_across_pieces() -> None:
    """Such a tokenizer is not known; a cache that answers wrongly stands for one."""
    tokenizer = byte_level()
    segments = segmented(tokenizer)
    segments.cache.get = lambda key: np.array([1], dtype=np.uint32)  # type: ignore[method-assign]
    with pytest.raises(CannotCut, match=r"^cut, the text .* of the self-check gets other token ids$"):
        selfcheck.check(segments, tokenizer)


def test_of_several_tokens_the_longest_is_found() -> None:
    assert _longest_of(sorted(["<a", "<ab", "<abc>", "<b", "]"])) == r"(?:<(?:a(?:b(?:c>)?)?|b)|\])"
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<a", "<ab", "<abc>", "<b"])
    segments = segmented(tokenizer)
    for text in ("<abc", "<abc>", "<a<ab<b>", "<abb", "x<a", "<a>", "<|im_start|>>"):
        assert np.array_equal(segments.token_ids(text, framed=False), encode_whole(tokenizer, text, framed=False))


@pytest.mark.parametrize("added", [(), ("<odd>",)])
def test_a_text_full_of_special_tokens_is_cut_a_bounded_number_of_times(added: tuple[str, ...]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = byte_level()
    tokenizer.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in added])
    segments = segmented(tokenizer)
    for text in ("a<|im_end|>" * 6000, "<|im_start|>" * 6000 + "b"):
        assert len(segments.cut(text).parts) == 2 * MAX_CUTS + 1
        assert np.array_equal(segments.token_ids(text, framed=False), encode_whole(tokenizer, text, framed=False))


def test_memory_is_bounded_and_what_was_forgotten_is_encoded_again() -> None:
    tokenizer = byte_level()
    segments = segmented(tokenizer, max_bytes=4000)
    chance = random.Random(SEED)
    texts = [chats.text(chance) + "<|im_end|>" + chats.text(chance) for _ in range(50)]
    for text in texts * 2:
        assert np.array_equal(segments.token_ids(text, framed=False), encode_whole(tokenizer, text, framed=False))
        assert segments.cache.bytes_used <= 4000


def test_only_new_pieces_are_encoded_and_the_tally_says_so() -> None:
    segments = segmented(byte_level())
    segments.token_ids("one<|im_end|>two<|im_end|>one", framed=False)
    assert (segments.tally.hits, segments.tally.misses) == (0, 3)  # at the beginning and within
    segments.token_ids("one<|im_end|>two<|im_end|>three", framed=False)
    assert (segments.tally.hits, segments.tally.misses) == (2, 4)
    assert segments.tally.hit_ratio() == 0.3333


@pytest.mark.covers("S21")
def test_turn_20_of_a_30k_token_chat_costs_a_fifteenth_of_the_whole() -> None:
    """An agent's chat: half of it instructions, then turns. CPU time of this thread, and the least of many endings on
    either side: what runs beside us must not decide."""
    tokenizer = byte_level()
    cached, plain = local(tokenizer), local(tokenizer, cache_bytes=0)
    chance, known = random.Random(SEED), words(random.Random(1))

    def said(role: str, count: int) -> dict[str, str]:
        return {"role": role, "content": " ".join(chance.choices(known, k=count))}

    messages = [said("system", 8000)]
    for _ in range(18):
        messages += (said("user", 60), said("assistant", 250))
    messages.append(said("user", 60))
    cached.encode(chats.prompt_of(messages=messages))
    cheap_s, whole_s = math.inf, math.inf
    for number in range(60):
        prompt = chats.prompt_of(messages=[*messages, said("assistant", 250), said("user", 60)])
        ids, spent_s = _timed(cached, prompt)
        cheap_s = min(cheap_s, spent_s)
        if number % 6 == 0:
            whole, spent_s = _timed(plain, prompt)
            whole_s = min(whole_s, spent_s)
            assert np.array_equal(ids, whole) and 27_000 < len(ids) < 33_000, len(ids)
    assert whole_s / cheap_s >= 15, (whole_s, cheap_s)
    cached.close()
    plain.close()


def _timed(tokenizer: LocalTokenizer, prompt: TextPrompt) -> tuple[TokenIds, float]:
    before = time.thread_time()
    ids = tokenizer.encode(prompt)
    return ids, time.thread_time() - before
