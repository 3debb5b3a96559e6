"""What the router knows about a prompt: its length and its block keys, never its text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec import Struct

# One uint64 per full block, chained: equal keys at i mean equal prompts up to and including block i.
BlockKeys = np.ndarray[tuple[int], np.dtype[np.uint64]]

# Token ids of one prompt, kept as an array from end to end (converting lists costs 40-200 ns per token).
TokenIds = np.ndarray[Any, np.dtype[np.uint32]]


class Prompt(Struct, frozen=True, eq=False):
    """A prompt as the router sees it.

    `keys` holds one array per block size in use in the fleet (`Router.block_sizes()`), each of length
    `prompt_tokens // block_size_tokens`. A prompt that cannot be scored (an image, an unknown shape, no tokenizer)
    has no keys and says why in `unscored_because`.
    `prompt_tokens` is None only when nobody could count the tokens.
    """

    prompt_tokens: int | None
    keys: Mapping[int, BlockKeys]
    unscored_because: str | None = None

    @property
    def scorable(self) -> bool:
        return self.unscored_because is None


class Usage(Struct, frozen=True):
    """Token counts as the engine reported them; None where it did not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    remote_outcome: str | None = None  # what came of KV that was to be loaded; `none`: nothing was to be
    remote_reason: str | None = None
    remote_loaded_tokens: int | None = None
    remote_bytes_read: int | None = None
    remote_path_ms: Mapping[str, float] | None = None
    contract_differs: tuple[str, ...] = ()
    tokens_by_scope: Mapping[str, int] | None = None  # of `cached_tokens`: how far each came


class Tenant(Struct, frozen=True):
    """Who owns a prefix. It comes from the credential, never from the request body."""

    name: str = "default"
    fingerprint_key: bytes = b""
    salt: str | None = None

    def __repr__(self) -> str:  # keys and salts stay out of logs
        return f"Tenant(name={self.name!r})"
