"""From text to token ids, off the loop: our own tokenizer when one is configured, else the worker's.

Nothing here fails a request. What cannot be tokenized in time is routed by load, and the receipt says why.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from typing import Any, Protocol

from kvrelay.core.model.prompt import TokenIds
from kvrelay.edge.gateway.openai import TextPrompt, Unscored
from kvrelay.edge.tokens.cache import TokenCache

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


class TokenService:
    """A tokenizer behind a cache of whole prompts and a deadline."""

    def __init__(self, tokenizer: Tokenizer, *, cache_bytes: int, deadline_s: float = DEADLINE_S) -> None:
        self.tokenizer = tokenizer
        self._cache = TokenCache(cache_bytes)
        self._deadline_s = deadline_s
        self._running = 0

    def at_once(self, prompt: TextPrompt, model: str | None) -> TokenIds | None:
        """None: not without waiting, see `token_ids`."""
        key = _digest(prompt, model, self.tokenizer.revision)
        found = self._cache.get(key)
        if found is None:
            found = self.tokenizer.at_once(prompt)
            if found is not None:
                self._cache.put(key, found)
        return found

    async def token_ids(self, prompt: TextPrompt, model: str | None) -> TokenIds | Unscored:
        """Never raises but for cancellation."""
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
        self._cache.put(_digest(prompt, model, revision), token_ids)
        return token_ids

    def close(self) -> None:
        self.tokenizer.close()


def _digest(prompt: TextPrompt, model: str | None, revision: int) -> bytes:
    state = hashlib.blake2b(digest_size=16, key=b"chat" if prompt.is_chat else b"text")
    state.update(b"%d\0%b\0" % (revision, (model or "").encode("utf-8", "surrogatepass")))
    state.update(prompt.raw)
    return state.digest()
