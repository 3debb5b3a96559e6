"""Bytes, special tokens and the template."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.edge.worker import tokenizer
from kvrelay.edge.worker.spec import SMALLEST_VOCABULARY
from kvrelay.edge.worker.tokenizer import ChatMessage, TextPart


@given(st.lists(st.sampled_from(["a", "é", "<", "|", "im_start", *tokenizer.SPECIAL_TOKENS])).map("".join))
def test_decode_is_the_inverse_of_encode(text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).tolist()) == text


def test_text_that_spells_a_special_token_becomes_it() -> None:
    assert tokenizer.encode("a<|im_end|>b").tolist() == [97, 258, 98]
    assert tokenizer.encode("").tolist() == []


def test_every_special_token_is_below_the_smallest_vocabulary() -> None:
    assert tokenizer.encode("".join(tokenizer.SPECIAL_TOKENS)).tolist() == list(range(256, SMALLEST_VOCABULARY))


def test_odd_input_has_a_text_and_no_error() -> None:
    assert tokenizer.encode("\ud800").tolist() == [ord("?")]
    assert tokenizer.decode([255, 199_999]) == "\N{REPLACEMENT CHARACTER}" * 2


def test_the_template() -> None:
    messages = [ChatMessage("system", "s"), ChatMessage("user", [TextPart("text", "a"), TextPart("text", "b")])]
    assert tokenizer.render_chat(messages) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.render_chat([ChatMessage("assistant")], add_generation_prompt=False) == (
        "<|im_start|>assistant\n<|im_end|>\n"
    )


def test_images_differ_by_content_and_other_parts_are_refused() -> None:
    def image(url: str) -> str:
        return tokenizer.render_chat([ChatMessage("user", [TextPart("image_url", image_url={"url": url})])])

    assert image("data:a") == image("data:a") != image("data:b")
    assert "data:" not in image("data:a") and "<|image|>" in image("data:a")
    with pytest.raises(ValueError, match="`audio` are not supported"):
        tokenizer.render_chat([ChatMessage("user", [TextPart("audio")])])
