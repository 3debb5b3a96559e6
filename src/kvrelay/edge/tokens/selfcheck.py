"""Before a tokenizer's texts are cut, its ids for unpleasant texts are compared with those of the texts as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from kvrelay.edge.tokens.segments import CannotCut, SegmentTokenizer, encode_whole
from kvrelay.edge.tokens.service import CannotTokenize
from kvrelay.edge.tokens.template import ChatTemplate

MAX_SPECIAL = 32  # of those a tokenizer has: more of them are alike

NASTY = (
    "",
    " ",
    "  before",
    "after  ",
    "\n",
    "\n\n\n",
    "\r\nline\r\n",
    "\tx",
    "a",
    "Two words",
    "don't  stop",
    "1,234.50",
    '{"a": [1, "b"]}',
    "é",
    "e\N{COMBINING ACUTE ACCENT}",
    "\N{COMBINING ACUTE ACCENT}x",
    "漢字かな",
    "İstanbul ﬁn ß",
    "👩‍👩‍👧‍👦🏽",
    "\N{ZERO WIDTH SPACE}x",
    "\N{ZERO WIDTH NO-BREAK SPACE}x",
    "\N{NO-BREAK SPACE}x",
    "▁x ▁",
    "Ġx",
    "##x",
    "<|",
    "|>",
    "\0",
)


def check(segments: SegmentTokenizer, tokenizer: Any, more_texts: Iterable[str] = ()) -> None:
    """Raises CannotCut at the first difference. Each text is asked for twice: new, and from the cache."""
    for text in (*_texts(segments.special), *more_texts):
        for framed in (False, True):
            try:
                whole = encode_whole(tokenizer, text, framed=framed)
                found = [segments.token_ids(text, framed=framed) for _ in range(2)]
            except Exception as error:  # the library raises bare Exception
                raise CannotCut(f"the tokenizer fails at a text of the self-check: {error}") from error
            for how, ids in zip(("cut", "remembered"), found, strict=True):
                if not np.array_equal(ids, whole):
                    raise CannotCut(f"{how}, the text {text!a} of the self-check gets other token ids")


def chats(template: ChatTemplate | None, special: Sequence[str]) -> list[str]:
    """Chats as the template writes them, with nasty contents; those that it refuses are left out."""
    if template is None:
        return []
    contents = (*NASTY, *special[:4])
    turns = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(contents)]
    rendered: list[str] = []
    for messages in (turns, turns[1:], turns[:1], [{"role": "system", "content": "\r\n"}, *turns[:3]]):
        try:
            rendered.append(template.render({"messages": msgspec.Raw(msgspec.json.encode(messages))}))
        except CannotTokenize:
            continue
    return rendered


def _texts(special: Sequence[str]) -> Iterator[str]:
    yield from NASTY
    chosen = special if len(special) <= MAX_SPECIAL else (*special[: MAX_SPECIAL // 2], *special[-MAX_SPECIAL // 2 :])
    for token, other in zip(chosen, reversed(chosen), strict=True):
        for nasty in (*NASTY, token[:-1], token[1:], token.upper(), token.lower()):
            yield f"{nasty}{token}{nasty}{other}{token} {nasty} {token}\n{nasty}"
