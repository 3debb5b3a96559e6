"""Block keys for the routing index: 64-bit, keyed, chained, computed with numpy over whole prompts.

The key of block i names the whole token chain up to and including block i, plus what else must be equal (block size,
adapter, salt, epoch, media), so equal keys at depth i mean equal prompts down to the first token.

How it is computed. Per block, the tokens are packed two to a word, each word is mixed (odd multiplication, shift-xor)
and the words are combined with secret random coefficients: a multilinear hash, whose collisions nobody can aim at
without the seed (Carter and Wegman's universal hashing). The chain is a running sum of the block digests, each
multiplied with a secret odd number that belongs to its depth:

    key[i] = key[i-1] + digest[i] * depth_factor[i]   (mod 2**64),  key[-1] = root

A sum can be formed for all blocks at once (numpy.cumsum), while a classic chain hash(parent, block) cannot; exchanging
two blocks still changes the keys because the factors differ. Two different chains collide with a chance of about
2**-63. That is plenty for an index, which is an estimate and never a proof; stores use `identity.py` (256 bits).

Python's own `hash`, and hashes over lists of ints, were rejected: per-process randomisation and 40-200 ns per token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from kvrelay.core.contract.digest import Field, keyed_digest
from kvrelay.core.model.prompt import BlockKeys, TokenIds

MAX_BLOCK_TOKENS = 4096
_INITIAL_DEPTH = 1024
_FEW_TOKENS = 32
_SHIFT_WORD, _SHIFT_FINAL = np.uint64(32), np.uint64(29)
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class Keyer:
    """Makes block keys under one seed. Same seed, same tokens, same tags: same keys, in every process."""

    def __init__(self, seed: bytes) -> None:
        self._seed = hashlib.blake2b(seed, digest_size=32, person=b"kvrelay-keys").digest()
        self._word_factor = np.uint64(self._secret("word") | 1)
        self._final_factor = np.uint64(self._secret("final") | 1)
        self._coefficients = _expand(self._secret("coefficients"), MAX_BLOCK_TOKENS) | np.uint64(1)
        self._plain_word_factor, self._plain_final_factor = int(self._word_factor), int(self._final_factor)
        self._plain_coefficients: list[int] = self._coefficients[:_FEW_TOKENS].tolist()
        self._depth_secret = self._secret("depth")
        self._depth_factors = _expand(self._depth_secret, _INITIAL_DEPTH) | np.uint64(1)
        self._roots: dict[tuple[int, str | None, str | None, int], int] = {}
        self._media: dict[str, int] = {}

    def root(
        self, block_size_tokens: int, *, adapter: str | None = None, salt: str | None = None, epoch: int = 0
    ) -> int:
        """The key "before the first block" of a chain with these tags."""
        tags = (block_size_tokens, adapter, salt, epoch)
        root = self._roots.get(tags)
        if root is None:
            if len(self._roots) >= 65_536:  # salts come from clients; recomputing a root is cheap
                self._roots.clear()
            root = self._roots[tags] = self._root(*tags)
        return root

    def prompt_keys(
        self,
        token_ids: TokenIds,
        block_size_tokens: int,
        *,
        adapter: str | None = None,
        salt: str | None = None,
        epoch: int = 0,
        media: Sequence[str | None] | None = None,
    ) -> BlockKeys:
        """Keys of all full blocks of a prompt: shape `(len(token_ids) // block_size_tokens,)`, uint64.

        `media[i]` is the digest of multimodal input that lies in block i. Tokens beyond the last full block do not
        count.
        """
        root = self.root(block_size_tokens, adapter=adapter, salt=salt, epoch=epoch)
        return self.extend(root, 0, token_ids, block_size_tokens, media=media)

    def extend(
        self,
        parent_key: int,
        parent_depth: int,
        token_ids: TokenIds,
        block_size_tokens: int,
        *,
        media: Sequence[str | None] | None = None,
    ) -> BlockKeys:
        """Keys of the blocks that follow the first `parent_depth` blocks of a chain whose last key is `parent_key`."""
        if not 0 < block_size_tokens <= MAX_BLOCK_TOKENS:
            raise ValueError(f"block size {block_size_tokens} is outside 1..{MAX_BLOCK_TOKENS} tokens")
        blocks = len(token_ids) // block_size_tokens
        if blocks == 0:
            return np.empty(0, dtype=np.uint64)
        if blocks == 1 and block_size_tokens <= _FEW_TOKENS and media is None:
            return np.array([self._next_key(parent_key, parent_depth, token_ids[:block_size_tokens])], dtype=np.uint64)
        digests = self._block_digests(token_ids, blocks, block_size_tokens)
        if media is not None:
            self._mark_media(digests, media)
        digests *= self._factors(parent_depth, blocks)
        digests[:1] += np.uint64(parent_key)  # as an array: wrapping around is meant and must not warn
        keys: BlockKeys = digests.cumsum(dtype=np.uint64)
        return keys

    def _block_digests(self, token_ids: TokenIds, blocks: int, block_size_tokens: int) -> BlockKeys:
        tokens = np.ascontiguousarray(token_ids[: blocks * block_size_tokens], dtype=np.uint32)
        pairs = block_size_tokens % 2 == 0
        words = tokens.view(np.uint64) if pairs else tokens.astype(np.uint64)
        words = words * self._word_factor
        words ^= words >> _SHIFT_WORD
        matrix = words.reshape(blocks, -1)
        digests: BlockKeys = matrix @ self._coefficients[: matrix.shape[1]]
        digests *= self._final_factor
        digests ^= digests >> _SHIFT_FINAL
        return digests

    def _next_key(self, parent_key: int, depth: int, token_ids: TokenIds) -> int:
        """The same sum in plain integers. A running generation fills one block at a time, and a handful of words is
        where setting up a dozen numpy calls costs more than the arithmetic."""
        tokens = token_ids.astype(np.uint32)
        words = (tokens.view(np.uint64) if len(tokens) % 2 == 0 else tokens).tolist()
        word_factor, digest = self._plain_word_factor, 0
        for word, coefficient in zip(words, self._plain_coefficients, strict=False):
            word = word * word_factor & _MASK
            digest += (word ^ word >> 32) * coefficient
        digest = digest * self._plain_final_factor & _MASK
        digest ^= digest >> 29
        return parent_key + digest * int(self._factors(depth, 1)[0]) & _MASK

    def _factors(self, depth: int, blocks: int) -> BlockKeys:
        needed = depth + blocks
        if needed > len(self._depth_factors):
            size = 1 << (needed - 1).bit_length()
            self._depth_factors = _expand(self._depth_secret, size) | np.uint64(1)
        return self._depth_factors[depth:needed]

    def _mark_media(self, digests: BlockKeys, media: Sequence[str | None]) -> None:
        for i, name in enumerate(media[: len(digests)]):
            if name is None:
                continue
            if len(self._media) >= 65_536:
                self._media.clear()
            mark = self._media.get(name)
            if mark is None:
                mark = self._media[name] = self._secret("media", ("digest", name.encode()))
            digests[i] ^= np.uint64(mark)

    def _root(self, block_size_tokens: int, adapter: str | None, salt: str | None, epoch: int) -> int:
        fields: list[Field] = [("block_size", str(block_size_tokens).encode()), ("epoch", str(epoch).encode())]
        if adapter is not None:
            fields.append(("adapter", adapter.encode()))
        if salt is not None:
            fields.append(("salt", salt.encode()))
        return self._secret("root", *fields)

    def _secret(self, purpose: str, *fields: Field) -> int:
        return int.from_bytes(keyed_digest(self._seed, (("purpose", purpose.encode()), *fields), digest_bytes=8), "big")


def _expand(secret: int, count: int) -> BlockKeys:
    """`count` pseudo-random words from one secret: SplitMix64 (Steele, Lea, Flood 2014), over a vector of indices."""
    words = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(secret & _MASK)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    expanded: BlockKeys = words ^ (words >> np.uint64(31))
    return expanded
