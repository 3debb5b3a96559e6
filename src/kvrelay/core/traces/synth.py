"""Prompts from block ids: the same seed gives the same bytes, and two blocks are equal exactly when their ids are.

"Exactly" is by construction and not by the odds of a hash: the first `ID_TOKENS` tokens of a block spell its scope and
id as digits in base `VOCABULARY_TOKENS`, each digit shifted by a constant of the seed (a bijection); the other tokens
are a mix of seed, scope, id and position, so that prompts look like text and not like a counter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from kvrelay.core.model.prompt import TokenIds
from kvrelay.core.traces.trace import Session, Trace

FIRST_TOKEN_ID = 300  # below lie special tokens and single bytes of most vocabularies
VOCABULARY_TOKENS = 30_000
ID_TOKENS = 4
MAX_SCOPES = 1 << 27
MAX_BLOCK_IDS = 1 << 32  # scope x id < VOCABULARY_TOKENS ** ID_TOKENS, see the assertion below

assert MAX_SCOPES * MAX_BLOCK_IDS < VOCABULARY_TOKENS**ID_TOKENS


class PromptSynth(Struct, frozen=True):
    """Makes the prompts of one trace. `block_tokens` may be smaller than the trace's block: the scale of the replay."""

    seed: int
    block_tokens: int
    scopes: dict[str, int]

    @classmethod
    def of(cls, trace: Trace, *, seed: int, block_tokens: int) -> PromptSynth:
        if block_tokens < ID_TOKENS:
            raise ValueError(f"block_tokens is {block_tokens}; an id needs {ID_TOKENS} tokens")
        names = dict.fromkeys(session.scope for session in trace.sessions)
        assert len(names) <= MAX_SCOPES, len(names)
        return cls(seed, block_tokens, {name: number for number, name in enumerate(names)})

    def blocks(self, scope: str, block_ids: Sequence[int]) -> TokenIds:
        """One row of `block_tokens` token ids per block id."""
        ids = np.asarray(block_ids, dtype=np.uint64)
        if ids.size and int(ids.max()) >= MAX_BLOCK_IDS:
            raise ValueError(f"block id {int(ids.max())} is above {MAX_BLOCK_IDS - 1}")
        identity = np.uint64(self.scopes[scope] * MAX_BLOCK_IDS) + ids
        positions = np.arange(self.block_tokens, dtype=np.uint64)
        mixed = _mix(identity[:, None] * np.uint64(0x9E3779B97F4A7C15) + _mix(positions + self._salt("fill"))[None, :])
        tokens = mixed % np.uint64(VOCABULARY_TOKENS)
        rest = identity.copy()
        for digit in range(ID_TOKENS):
            shift = self._salt(f"digit{digit}") % np.uint64(VOCABULARY_TOKENS)
            tokens[:, digit] = (rest % np.uint64(VOCABULARY_TOKENS) + shift) % np.uint64(VOCABULARY_TOKENS)
            rest //= np.uint64(VOCABULARY_TOKENS)
        return tokens.astype(np.uint32) + np.uint32(FIRST_TOKEN_ID)

    def prompt(self, trace: Trace, session: Session, turn_index: int) -> TokenIds:
        """The whole context of a turn. Tokens beyond the listed blocks are this turn's own and shared with nobody."""
        turn = session.turns[turn_index]
        length = max(1, round(turn.input_tokens * self.block_tokens / trace.block_size_tokens))
        tokens = self.blocks(session.scope, turn.block_ids).reshape(-1)[:length]
        missing = length - tokens.size
        if not missing:
            return tokens
        return np.concatenate([tokens, self._tail(f"{session.session_id}\0{turn_index}", missing)])

    def unrelated(self, name: str, length_tokens: int) -> TokenIds:
        """A prompt that shares nothing with the trace (a primer's)."""
        return self._tail(f"unrelated\0{name}", length_tokens)

    def _tail(self, name: str, length_tokens: int) -> TokenIds:
        positions = np.arange(length_tokens, dtype=np.uint64)
        mixed = _mix(positions * np.uint64(0x9E3779B97F4A7C15) + self._salt(f"tail\0{name}"))
        # Above the blocks' range, so that not even a whole block of tail can equal a block of the trace.
        return (mixed % np.uint64(1000)).astype(np.uint32) + np.uint32(FIRST_TOKEN_ID + VOCABULARY_TOKENS)

    def _salt(self, name: str) -> np.uint64:
        digest = hashlib.blake2b(f"{self.seed}\0{name}".encode(), digest_size=8).digest()
        return np.uint64(int.from_bytes(digest, "little"))


def _mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64, on a whole array."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(values ^ (values >> np.uint64(31)))
