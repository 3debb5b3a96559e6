"""Token ids of a text, piece by piece, so that a growing conversation costs only what is new in it.

A tokenizer looks for its added tokens first, in the raw text and before anything else happens to it: what lies between
two of them is normalized, split and encoded on its own. So a text may be cut at its special tokens, every piece looked
up under its digest, and only the unknown ones be encoded. Two things could break this:

- An added token that takes white space along or wants word boundaries looks at its neighbours: no cutting then. Tokens
  that are looked for after normalizing lie within a piece and do no harm. Those that are not special are obeyed where
  they cover a special one, but not cut at (some vocabularies have one for every run of white space).
- Some pre-tokenizers treat the very beginning of a text unlike all others. A piece from further within is therefore
  encoded behind a special token, which is dropped again, and remembered apart from the same text at the beginning.

That this holds for a tokenizer is checked when it is loaded (`selfcheck.py`) and by samples ever after (`local.py`).
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from kvrelay.core.model.prompt import TokenIds
from kvrelay.edge.tokens.cache import TokenCache, digest

MAX_CUTS = 4096  # in one text; what follows is one piece, special tokens and all
NO_IDS: TokenIds = np.empty(0, dtype=np.uint32)


class CannotCut(Exception):
    """Why this tokenizer's texts must be encoded whole."""


class Cut(Struct):
    """A text in pieces. `ids` has an entry for each of `parts`, empty where `missing` has the key instead."""

    parts: list[str]  # text, special token, text, special token, ..., text
    ids: list[TokenIds]
    missing: dict[int, bytes]  # place in `parts` -> key
    pieces: int  # not empty, not special
    new_chars: int
    reused_tokens: int


class Tally(Struct):
    """What was looked up, and with which success. Special tokens are not counted. Not exact across threads."""

    hits: int = 0
    misses: int = 0
    reused_tokens: int = 0
    encoded_tokens: int = 0

    def hit_ratio(self) -> float | None:
        looked_up = self.hits + self.misses
        return round(self.hits / looked_up, 4) if looked_up else None


def encode_whole(tokenizer: Any, text: str, *, framed: bool) -> TokenIds:
    """`framed`: with the tokens that the tokenizer itself puts around a text."""
    return _encode(tokenizer, [text], framed=framed)[0]


class SegmentTokenizer:
    """Encodes what it has not seen; may be used by several threads."""

    def __init__(self, tokenizer: Any, *, max_bytes: int, tally: Tally) -> None:
        """Raises CannotCut."""
        self.tally = tally
        self.cache: TokenCache[TokenIds] = TokenCache(max_bytes)
        self._tokenizer = tokenizer
        tokens = _raw_tokens(tokenizer)
        self.special = tuple(token.content for token in tokens if token.special)
        if not self.special:
            raise CannotCut("the tokenizer has no special tokens to cut at")
        self._ids = {content: _encode(tokenizer, [content], framed=False)[0] for content in self.special}
        self._split = _splitter([token.content for token in tokens], frozenset(self.special))
        self._anchor = _anchor(self.special, [token.content for token in tokens])
        self._before, self._after = self._frame()

    def token_ids(self, text: str, *, framed: bool) -> TokenIds:
        return self.complete(self.cut(text), framed=framed)

    def cut(self, text: str) -> Cut:
        """Looks up everything and encodes nothing."""
        parts = self._split(text)
        ids = [self._ids[part] if at % 2 else NO_IDS for at, part in enumerate(parts)]
        seen: dict[str, TokenIds | bytes] = {}  # what lies between messages is the same everywhere
        missing: dict[int, bytes] = {}
        reused_tokens = pieces = new_chars = 0
        for at in range(0, len(parts), 2):
            part = parts[at]
            if not part:
                continue
            pieces += 1
            found = seen.get(part)
            if found is None:
                key = _key(part, is_first=at == 0)
                found = self.cache.get(key)
                if found is None:
                    found = key
                    new_chars += len(part)
                if at:
                    seen[part] = found
            if isinstance(found, bytes):
                missing[at] = found
            else:
                ids[at] = found
                reused_tokens += found.size
        return Cut(parts, ids, missing, pieces=pieces, new_chars=new_chars, reused_tokens=reused_tokens)

    def complete(self, cut: Cut, *, framed: bool) -> TokenIds:
        """To be called once for each cut."""
        self.tally.hits += cut.pieces - len(cut.missing)
        self.tally.misses += len(cut.missing)
        self.tally.reused_tokens += cut.reused_tokens
        if cut.missing:
            self._fill(cut)
        if framed:
            return np.concatenate([self._before, *cut.ids, self._after])
        return np.concatenate(cut.ids)

    def _fill(self, cut: Cut) -> None:
        places = {key: at for at, key in cut.missing.items()}  # the same piece may be in there twice
        texts = [cut.parts[at] if at == 0 else self._anchor + cut.parts[at] for at in places.values()]
        encoded = _encode(self._tokenizer, texts, framed=False)
        fresh = {key: ids if at == 0 else ids[1:] for (key, at), ids in zip(places.items(), encoded, strict=True)}
        for key, ids in fresh.items():
            self.cache.put(key, ids)
            self.tally.encoded_tokens += ids.size
        for at, key in cut.missing.items():
            cut.ids[at] = fresh[key]

    def _frame(self) -> tuple[TokenIds, TokenIds]:
        """What the tokenizer puts before and after a text, told from a text that has none of it."""
        empty = _encode(self._tokenizer, [""], framed=True)[0].tolist()
        for probe in (*self.special, "a"):
            plain = _encode(self._tokenizer, [probe], framed=False)[0].tolist()
            if len(plain) != 1 or plain[0] in empty:
                continue
            framed = _encode(self._tokenizer, [probe], framed=True)[0]
            at = framed.tolist().index(plain[0])
            return framed[:at], framed[at + 1 :]
        raise CannotCut("it cannot be told which tokens the tokenizer puts around a text")


def _encode(tokenizer: Any, texts: Sequence[str], *, framed: bool) -> list[TokenIds]:
    """In a batch even for one text: `encode` would keep every other thread, the event loop's too, from running."""
    encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=framed)
    return [np.frombuffer(array("I", encoding.ids), dtype=np.uint32) for encoding in encodings]


def _raw_tokens(tokenizer: Any) -> list[Any]:
    """The added tokens that are looked for in the raw text. Raises CannotCut when one of them minds its neighbours."""
    if getattr(tokenizer.model, "dropout", None):
        raise CannotCut("the tokenizer draws lots (dropout)")
    added = [token for token in tokenizer.get_added_tokens_decoder().values() if token.content]
    for token in added:
        if token.special and token.normalized:
            raise CannotCut(f"the special token `{token.content}` is looked for in normalized text")
    raw = [token for token in added if not token.normalized]
    for token in raw:
        if token.lstrip or token.rstrip:
            raise CannotCut(f"the added token `{token.content}` takes white space along")
        if token.single_word:
            raise CannotCut(f"the added token `{token.content}` wants word boundaries")
    return raw


def _anchor(special: Iterable[str], tokens: Sequence[str]) -> str:
    """A special token that no following text can turn into a longer one."""
    for candidate in special:
        if not any(token.startswith(candidate) and token != candidate for token in tokens):
            return candidate
    raise CannotCut("every special token is the beginning of another")


def _splitter(tokens: Sequence[str], special: frozenset[str]) -> Callable[[str], list[str]]:
    pattern = re.compile(f"({_longest_of(sorted(set(tokens)))})")
    if special.issuperset(tokens):
        return lambda text: pattern.split(text, MAX_CUTS)
    return lambda text: _split_at(pattern, special, text)


def _split_at(pattern: re.Pattern[str], special: frozenset[str], text: str) -> list[str]:
    """As `pattern.split`, but only where a special token was found."""
    parts: list[str] = []
    start = 0
    for match in pattern.finditer(text):
        if match.group() in special:
            parts += (text[start : match.start()], match.group())
            start = match.end()
            if len(parts) == 2 * MAX_CUTS:
                break
    parts.append(text[start:])
    return parts


def _longest_of(words: Sequence[str]) -> str:
    """A pattern for the longest of the (sorted) words that begin at a place; shared beginnings are tried once."""
    if len(words) == 1:
        return re.escape(words[0])
    shared = _shared(words[0], words[-1])
    if shared:
        return re.escape(words[0][:shared]) + _longest_of([word[shared:] for word in words])
    by_first: dict[str, list[str]] = {}
    for word in words:
        if word:
            by_first.setdefault(word[0], []).append(word)
    branches = "|".join(_longest_of(group) for group in by_first.values())
    return f"(?:{branches})?" if "" in words else f"(?:{branches})"


def _shared(first: str, last: str) -> int:
    """Length of the common beginning of sorted words, told from the first and the last of them."""
    return next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))


def _key(part: str, *, is_first: bool) -> bytes:
    key = digest(part.encode())
    return b"^" + key if is_first else key
