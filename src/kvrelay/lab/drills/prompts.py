"""Prompts by seed: the same text means the same tokens in every fleet and every run."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from kvrelay.core.model.prompt import TokenIds

FIRST_LETTER, LETTERS = ord("a"), 26
FIRST_TOKEN, LAST_TOKEN = 300, 500  # ordinary tokens of the smallest vocabulary that we drill, that of a test model


class Part(Struct, frozen=True):
    """`tokens` made-up tokens; equal seeds begin alike."""

    seed: int
    tokens: int


class Text(Struct, frozen=True):
    """Parts in a row. Texts that begin with the same parts have that prefix in common."""

    parts: tuple[Part, ...]

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)

    def then(self, seed: int, tokens: int) -> Text:
        return Text((*self.parts, Part(seed, tokens)))

    def shifted(self, by: int) -> Text:
        """Other tokens; what texts have in common they still have."""
        return Text(tuple(Part(part.seed + by, part.tokens) for part in self.parts))

    def token_ids(self) -> TokenIds:
        """uint32, shape (tokens,)."""
        drawn = [np.random.default_rng(part.seed).integers(FIRST_TOKEN, LAST_TOKEN, part.tokens) for part in self.parts]
        return np.concatenate(drawn).astype(np.uint32)

    def letters(self) -> str:
        """As a text of as many letters, for who takes no token ids; a mock worker has one token for each."""
        return "".join(chr(FIRST_LETTER + int(token) % LETTERS) for token in self.token_ids())


def text(seed: int, tokens: int) -> Text:
    return Text((Part(seed, tokens),))
