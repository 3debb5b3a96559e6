"""Our own tokenizer: a `tokenizer.json` and a chat template, with a cache of segments where that is sound.

Long texts are encoded in a thread of their own, so that neither the relay nor a short prompt waits for them. Only a
small prompt of which nearly everything is known is put together in the loop itself.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from kvrelay.core.model.prompt import TokenIds
from kvrelay.edge.gateway.openai import TextPrompt
from kvrelay.edge.system.sections import TokensSection
from kvrelay.edge.tokens import selfcheck
from kvrelay.edge.tokens.segments import CannotCut, SegmentTokenizer, Tally, encode_whole
from kvrelay.edge.tokens.service import CannotTokenize
from kvrelay.edge.tokens.template import ChatTemplate

SAMPLE_EVERY = 1000  # prompts; one of them is encoded whole as well
IN_LOOP_PROMPT_BYTES = 16 * 1024
IN_LOOP_NEW_CHARS = 1024  # to encode them costs the loop about what handing over to a thread would
LONG_PROMPT_BYTES = 64 * 1024

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

log = logging.getLogger(__name__)


class LocalTokenizer:
    """Closed by `close()`. `why` says why there is no segment cache, if there is none."""

    def __init__(self, tokenizer: Any, template: ChatTemplate | None, *, cache_bytes: int) -> None:
        # one thread per text is enough: the other cores belong to the relay
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        tokenizer.no_truncation()  # engines refuse what is too long, they do not shorten it
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        self._distrusted = 0
        self._prompts = 0
        self._samples = 0
        self._short = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize-short")
        self._long = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize-long")
        self._tally = Tally()
        self.segments: SegmentTokenizer | None = None
        self.why: str | None = None
        try:
            self.segments = _checked_segments(tokenizer, template, cache_bytes, self._tally)
        except CannotCut as reason:
            self.why = str(reason)
            log.info("prompts are tokenized whole, there is no segment cache: %s", reason)

    @property
    def revision(self) -> int:
        """Changes after a wrong answer, and every minute for a template that writes the time."""
        minute = int(time.time() // 60) if self._template is not None and self._template.tells_time else 0
        return self._distrusted + 2 * minute

    def at_once(self, prompt: TextPrompt) -> TokenIds | None:
        segments = self.segments
        if segments is None or len(prompt.raw) > IN_LOOP_PROMPT_BYTES or self._sample_is_due():
            return None
        try:
            cut = segments.cut(self._text(prompt))
            if cut.new_chars > IN_LOOP_NEW_CHARS:
                return None
            token_ids = segments.complete(cut, framed=not prompt.is_chat)
        except Exception:  # the reason is found again where it can be told
            return None
        self._prompts += 1
        return token_ids

    async def token_ids(self, prompt: TextPrompt, model: str | None) -> TokenIds:
        if prompt.is_chat and self._template is None:
            raise CannotTokenize("no_chat_template")
        thread = self._long if len(prompt.raw) > LONG_PROMPT_BYTES else self._short
        return await asyncio.get_running_loop().run_in_executor(thread, self.encode, prompt)

    def encode(self, prompt: TextPrompt) -> TokenIds:
        """Raises CannotTokenize. Takes its time."""
        framed = not prompt.is_chat  # a template writes its special tokens itself
        segments = self.segments  # the other thread may turn it off
        text = self._text(prompt)
        is_sample = self._sample_is_due()
        self._prompts += 1
        try:
            if segments is None:
                return encode_whole(self._tokenizer, text, framed=framed)
            token_ids = segments.token_ids(text, framed=framed)
            return self._verified(token_ids, text, framed=framed) if is_sample else token_ids
        except UnicodeError as error:  # JSON can say what no text contains: half of a surrogate pair
            raise CannotTokenize("invalid_text") from error
        except Exception as error:  # the library raises bare Exception, for instance without a token for the unknown
            raise CannotTokenize("tokenizer_failed") from error

    def text_of(self, token_ids: TokenIds) -> str:
        """As the tokenizer spells them, special tokens too."""
        spelt: str = self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=False)
        return spelt

    def lookups(self) -> tuple[int, int]:
        """Hits and misses so far; they stay when the cache is turned off."""
        return self._tally.hits, self._tally.misses

    def describe(self) -> Mapping[str, Any]:
        return {
            "tokenizer": "local",
            "cache": "off" if self.segments is None else "on",
            "why": self.why,
            "hits": self._tally.hits,
            "misses": self._tally.misses,
            "hit_ratio": self._tally.hit_ratio(),
            "reused_tokens": self._tally.reused_tokens,
            "encoded_tokens": self._tally.encoded_tokens,
            "samples": self._samples,
            "cache_bytes": 0 if self.segments is None else self.segments.cache.bytes_used,
        }

    def close(self) -> None:
        for thread in (self._short, self._long):
            thread.shutdown(wait=False, cancel_futures=True)

    def _text(self, prompt: TextPrompt) -> str:
        if not prompt.is_chat:
            text: str = prompt.payload["prompt"]
            return text
        if self._template is None:
            raise CannotTokenize("no_chat_template")
        return self._template.render(prompt.payload)

    def _sample_is_due(self) -> bool:
        return (self._prompts + 1) % SAMPLE_EVERY == 0

    def _verified(self, token_ids: TokenIds, text: str, *, framed: bool) -> TokenIds:
        whole = encode_whole(self._tokenizer, text, framed=framed)
        self._samples += 1
        if not np.array_equal(token_ids, whole):
            self.segments = None
            self._distrusted += 1
            self.why = f"a sample got other token ids whole than in segments ({len(whole)} and {len(token_ids)} tokens)"
            log.error("the segment cache is off, prompts are tokenized whole from now on: %s", self.why)
        return whole


def local_tokenizer(section: TokensSection, *, cache_bytes: int) -> LocalTokenizer:
    """Raises OSError or ValueError when a file cannot be used, ImportError without the `tokens` extra."""
    import tokenizers

    assert section.tokenizer is not None
    source = section.tokenizer.read_text(encoding="utf-8")
    try:
        tokenizer = tokenizers.Tokenizer.from_str(source)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"not a tokenizer.json: {error}") from error
    template = None if section.template is None else _template(section.template, beside=section.tokenizer)
    return LocalTokenizer(tokenizer, template, cache_bytes=cache_bytes)


def _template(file: Path, *, beside: Path) -> ChatTemplate:
    source = file.read_text(encoding="utf-8")
    try:
        return ChatTemplate(source, _named_tokens(beside.with_name("tokenizer_config.json")))
    except jinja2.TemplateError as error:
        raise ValueError(f"not a chat template: {error}") from error


def _named_tokens(config_file: Path) -> Mapping[str, str]:
    """What chat templates expect to find by name; written as a plain string or as an object with its `content`."""
    if not config_file.is_file():
        return {}
    config = json.loads(config_file.read_text(encoding="utf-8"))
    stated = {name: config[name] for name in NAMED_TOKENS if config.get(name) is not None}
    return {name: token["content"] if isinstance(token, dict) else str(token) for name, token in stated.items()}


def _checked_segments(
    tokenizer: Any, template: ChatTemplate | None, cache_bytes: int, tally: Tally
) -> SegmentTokenizer:
    """Raises CannotCut."""
    if cache_bytes <= 0:
        raise CannotCut("`tokens.cache_mb` is 0")
    trial = SegmentTokenizer(tokenizer, max_bytes=cache_bytes, tally=Tally())
    selfcheck.check(trial, tokenizer, selfcheck.chats(template, trial.special))
    return SegmentTokenizer(tokenizer, max_bytes=cache_bytes, tally=tally)  # without what the check left in it
