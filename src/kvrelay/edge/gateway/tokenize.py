"""From text to token ids, off the loop: our own tokenizer when one is configured, else the worker's.

Nothing here fails a request. What cannot be tokenized in time is routed by load, and the receipt says why.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from msgspec import Struct

from kvrelay.core.model.prompt import TokenIds
from kvrelay.edge.connectors.base import WorkerAnswerUnusable, WorkerUnreachable
from kvrelay.edge.fleet.static import Fleet
from kvrelay.edge.fleet.view import WorkerView
from kvrelay.edge.gateway.openai import TextPrompt, Unscored
from kvrelay.edge.system.sections import TokensSection

DEADLINE_S = 2.0
MAX_QUESTIONS = 64  # at the same time; more requests than that are routed unscored rather than queued


class Tokenizer(Protocol):
    """Where token ids come from."""

    async def token_ids(self, prompt: TextPrompt, model: str | None) -> TokenIds:
        """Raises CannotTokenize."""
        ...

    def close(self) -> None: ...


class CannotTokenize(Exception):
    """The reason is a word for the receipt."""


class TokenService:
    """A tokenizer behind a cache and a deadline."""

    def __init__(self, tokenizer: Tokenizer, *, cache_mb: int, deadline_s: float = DEADLINE_S) -> None:
        self._tokenizer = tokenizer
        self._cache = TokenCache(cache_mb * 2**20)
        self._deadline_s = deadline_s
        self._running = 0

    def cached(self, prompt: TextPrompt, model: str | None) -> TokenIds | None:
        return self._cache.get(_digest(prompt, model))

    async def token_ids(self, prompt: TextPrompt, model: str | None) -> TokenIds | Unscored:
        """Never raises but for cancellation."""
        if self._running >= MAX_QUESTIONS:
            return Unscored("tokenizer_busy")
        self._running += 1
        try:
            async with asyncio.timeout(self._deadline_s):
                token_ids = await self._tokenizer.token_ids(prompt, model)
        except TimeoutError:
            return Unscored("tokenizer_too_slow")
        except CannotTokenize as reason:
            return Unscored(str(reason))
        finally:
            self._running -= 1
        self._cache.put(_digest(prompt, model), token_ids)
        return token_ids

    def close(self) -> None:
        self._tokenizer.close()


class TokenCache:
    """Least recently used ids go first; bounded in bytes of ids. Keys are digests: no text is kept."""

    ENTRY_OVERHEAD_BYTES = 200

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[bytes, TokenIds] = OrderedDict()

    def get(self, key: bytes) -> TokenIds | None:
        token_ids = self._entries.get(key)
        if token_ids is not None:
            self._entries.move_to_end(key)
        return token_ids

    def put(self, key: bytes, token_ids: TokenIds) -> None:
        cost = self._cost(token_ids)
        if key in self._entries or cost > self._max_bytes:
            return
        self._entries[key] = token_ids
        self._bytes += cost
        while self._bytes > self._max_bytes:
            _, dropped = self._entries.popitem(last=False)
            self._bytes -= self._cost(dropped)

    def _cost(self, token_ids: TokenIds) -> int:
        return token_ids.nbytes + self.ENTRY_OVERHEAD_BYTES


def _digest(prompt: TextPrompt, model: str | None) -> bytes:
    state = hashlib.blake2b(digest_size=16, key=b"chat" if prompt.is_chat else b"text")
    state.update((model or "").encode())
    state.update(b"\0")
    state.update(prompt.raw)
    return state.digest()


class WorkerTokenizer:
    """Asks a worker that serves the model, each in turn."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._turn = 0

    async def token_ids(self, prompt: TextPrompt, model: str | None) -> TokenIds:
        view = self._someone(model)
        payload = dict(prompt.payload) if model is None else {"model": model, **prompt.payload}
        assert view.connector is not None
        try:
            return await view.connector.tokenize(self._fleet.session, view.url, payload, view.headers)
        except WorkerUnreachable as error:
            raise CannotTokenize("tokenizer_unreachable") from error
        except WorkerAnswerUnusable as error:
            raise CannotTokenize("tokenizer_refused") from error

    def close(self) -> None:
        return

    def _someone(self, model: str | None) -> WorkerView:
        able = [view for view in self._fleet.views() if view.last_probe_ok and _serves(view, model)]
        if not able:
            raise CannotTokenize("no_tokenizer")
        self._turn += 1
        return able[self._turn % len(able)]


def _serves(view: WorkerView, model: str | None) -> bool:
    if view.connector is None or view.spec is None:
        return False
    names = (*view.spec.models, *view.spec.adapters)
    return model is None or not names or model in names


class SpecialTokens(Struct, frozen=True):
    """What chat templates expect to find by name."""

    bos_token: str = ""
    eos_token: str = ""


class LocalTokenizer:
    """A `tokenizer.json`, and a chat template beside it. One thread, so that long texts do not stop the relay."""

    def __init__(self, tokenizer: Any, render: Callable[[Mapping[str, Any]], str] | None) -> None:
        self._tokenizer = tokenizer
        self._render = render
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")

    async def token_ids(self, prompt: TextPrompt, model: str | None) -> TokenIds:
        if prompt.is_chat and self._render is None:
            raise CannotTokenize("no_chat_template")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._encode, prompt)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _encode(self, prompt: TextPrompt) -> TokenIds:
        if not prompt.is_chat:
            text, special = prompt.payload["prompt"], True
        else:
            text, special = self._rendered(prompt.payload), False  # a template writes its special tokens itself
        ids = self._tokenizer.encode(text, add_special_tokens=special).ids
        return np.array(ids, dtype=np.uint32)

    def _rendered(self, payload: Mapping[str, Any]) -> str:
        assert self._render is not None
        members = {name: msgspec.json.decode(value) for name, value in payload.items()}
        if "chat_template" in members:
            raise CannotTokenize("own_chat_template")
        try:
            return self._render(members)
        except Exception as error:  # whatever a template or a client's message makes of it
            raise CannotTokenize("template_failed") from error


def local_tokenizer(section: TokensSection) -> LocalTokenizer:
    """Raises OSError or ValueError when a file cannot be used, ImportError without the `tokens` extra."""
    import tokenizers

    assert section.tokenizer is not None
    try:
        tokenizer = tokenizers.Tokenizer.from_str(section.tokenizer.read_text(encoding="utf-8"))
    except OSError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"not a tokenizer.json: {error}") from error
    if section.template is None:
        return LocalTokenizer(tokenizer, None)
    return LocalTokenizer(tokenizer, _renderer(section.template, _special_tokens(section.tokenizer)))


def _renderer(template_file: Path, special: SpecialTokens) -> Callable[[Mapping[str, Any]], str]:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = _raise_from_template
    template = environment.from_string(template_file.read_text(encoding="utf-8"))

    def render(members: Mapping[str, Any]) -> str:
        options = dict(members.get("chat_template_kwargs") or {})
        return template.render(
            messages=members["messages"],
            tools=members.get("tools"),
            documents=members.get("documents"),
            add_generation_prompt=members.get("add_generation_prompt", True),
            bos_token=special.bos_token,
            eos_token=special.eos_token,
            **options,
        )

    return render


def _raise_from_template(message: str) -> None:
    raise ValueError(message)


def _special_tokens(tokenizer_file: Path) -> SpecialTokens:
    beside = tokenizer_file.with_name("tokenizer_config.json")
    if not beside.is_file():
        return SpecialTokens()
    config = json.loads(beside.read_text(encoding="utf-8"))
    return SpecialTokens(_token_text(config.get("bos_token")), _token_text(config.get("eos_token")))


def _token_text(value: Any) -> str:
    """Written as a plain string or as an object with its `content`."""
    return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")
