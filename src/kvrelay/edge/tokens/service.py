"""From text to token ids, off the loop: our own tokenizer when one is configured, else the worker's.

Nothing here fails a request. What cannot be tokenized in time is routed by load, and the receipt says why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from kvrelay.core.contract.keys import Keyer
from kvrelay.core.model.prompt import BlockKeys, TokenIds
from kvrelay.edge.gateway.openai import TextPrompt, Unscored
from kvrelay.edge.tokens.cache import TokenCache, digest

DEADLINE_S = 2.0
MAX_PROMPT_BYTES = 8 * 2**20  # more than any context; it would hold up all others
MAX_QUESTIONS = 64  # at the same time; more requests than that are routed unscored rather than queued


class CannotTokenize(Exception):
    """The reason is a word for the receipt."""


class Tokenizer(Protocol):
    """Where token ids come from."""

    @property
    def revision(self) -> int:
        """Another number than before: ids got earlier may not be right any more."""
        ...

    def at_once(self, prompt: TextPrompt) -> TokenIds | None:
        """In the loop, when that is cheaper than to wait; None: ask `token_ids`. Never raises."""
        ...

    async def token_ids(self, prompt: TextPrompt, model: str | None) -> TokenIds:
        """Raises CannotTokenize."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """Its part of /admin/status."""
        ...

    def close(self) -> None: ...


class KnownTokens:
    """Token ids of a prompt, with the block keys that were made of them so far.

    An agent sends the same text again and again; the hashing then is as superfluous as the tokenizing.
    """

    MAX_TAGS = 4  # block sizes, adapters and salts that one text is asked for under at a time

    __slots__ = ("_keys", "token_ids")

    def __init__(self, token_ids: TokenIds) -> None:
        self.token_ids = token_ids
        self._keys: dict[tuple[int, str | None, str | None], BlockKeys] = {}

    @property
    def nbytes(self) -> int:
        """Room for the keys of the usual block sizes is counted in from the start."""
        return self.token_ids.nbytes + self.token_ids.nbytes // 4

    def keys(self, keyer: Keyer, block_size_tokens: int, *, adapter: str | None, salt: str | None) -> BlockKeys:
        tags = (block_size_tokens, adapter, salt)
        keys = self._keys.get(tags)
        if keys is None:
            if len(self._keys) == self.MAX_TAGS:
                self._keys.clear()
            keys = keyer.prompt_keys(self.token_ids, block_size_tokens, adapter=adapter, salt=salt)
            self._keys[tags] = keys
        return keys


class TokenService:
    """A tokenizer behind a cache of whole prompts and a deadline."""

    def __init__(self, tokenizer: Tokenizer, *, cache_bytes: int, deadline_s: float = DEADLINE_S) -> None:
        self.tokenizer = tokenizer
        self._cache: TokenCache[KnownTokens] = TokenCache(cache_bytes)
        self._deadline_s = deadline_s
        self._running = 0

    def at_once(self, prompt: TextPrompt, model: str | None) -> KnownTokens | Unscored | None:
        """None: not without waiting, see `token_ids`."""
        key = _digest(prompt, model, self.tokenizer.revision)
        known = self._cache.get(key)
        if known is not None:
            return known
        problem = prompt.read()
        if problem is not None:
            return problem
        token_ids = self.tokenizer.at_once(prompt)
        return None if token_ids is None else self._keep(key, token_ids)

    async def token_ids(self, prompt: TextPrompt, model: str | None) -> KnownTokens | Unscored:
        """Of a prompt that `at_once` could not do. Never raises but for cancellation."""
        if len(prompt.raw) > MAX_PROMPT_BYTES:
            return Unscored("prompt_too_large")
        if self._running >= MAX_QUESTIONS:
            return Unscored("tokenizer_busy")
        self._running += 1
        revision = self.tokenizer.revision
        try:
            async with asyncio.timeout(self._deadline_s):
                token_ids = await self.tokenizer.token_ids(prompt, model)
        except TimeoutError:
            return Unscored("tokenizer_too_slow")
        except CannotTokenize as reason:
            return Unscored(str(reason))
        finally:
            self._running -= 1
        return self._keep(_digest(prompt, model, revision), token_ids)

    def _keep(self, key: bytes, token_ids: TokenIds) -> KnownTokens:
        known = KnownTokens(token_ids)
        self._cache.put(key, known)
        return known

    def close(self) -> None:
        self.tokenizer.close()


def _digest(prompt: TextPrompt, model: str | None, revision: int) -> bytes:
    kind = "chat" if prompt.is_chat else "text"
    head = f"{kind}\0{revision}\0{model or ''}\0".encode("utf-8", "surrogatepass")
    return digest(head + prompt.raw)
