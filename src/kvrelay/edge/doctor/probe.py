"""Two equal requests to one worker, and what its event sources say of them.

The prompt is made of token ids drawn at random from the range that every tokenizer has: no text of anybody, and no
prefix that is cached anywhere. It is three blocks long and one token more, and one token is generated for it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping

import aiohttp
import msgspec
import numpy as np
from msgspec import Struct

from kvrelay.core.doctor.facts import ProbeFacts
from kvrelay.core.model.events import BlocksStored, KvEvent
from kvrelay.core.model.prompt import Usage
from kvrelay.edge.connectors.base import Connector, DecodedBatch, MalformedEvents
from kvrelay.edge.system.urls import join_url

BLOCKS = 3
LOWEST_ID, HIGHEST_ID = 5, 250  # special tokens lie outside in the vocabularies that we know
DEFAULT_BLOCK_TOKENS = 16
REQUEST_TIMEOUT_S = 120.0


class Answered(Struct, frozen=True):
    seconds: float
    usage: Usage


class ProbeFailed(Exception):
    """The worker did not answer a completion; the text says what it did."""


def made_up_prompt(seed: int, block_size_tokens: int | None) -> tuple[int, ...]:
    """With one seed, prompts for all block sizes begin alike, so that workers can be compared."""
    chance = random.Random(seed)
    count = BLOCKS * (block_size_tokens or DEFAULT_BLOCK_TOKENS) + 1
    return tuple(chance.randrange(LOWEST_ID, HIGHEST_ID) for _ in range(count))


async def complete(
    session: aiohttp.ClientSession,
    connector: Connector,
    url: str,
    headers: Mapping[str, str],
    prompt: tuple[int, ...],
    model: str | None,
) -> Answered:
    """Raises ProbeFailed."""
    body = {"prompt": list(prompt), "max_tokens": 1, "temperature": 0}
    if model is not None:
        body["model"] = model
    began = time.monotonic()
    try:
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        target = join_url(url, "/v1/completions")
        async with session.post(target, json=body, headers=dict(headers), timeout=timeout) as response:
            raw = await response.read()
            if response.status != 200:
                raise ProbeFailed(f"/v1/completions answered {response.status}")
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise ProbeFailed(f"{type(error).__name__}: {error}") from error
    return Answered(time.monotonic() - began, connector.usage_from_body(raw))


def facts_of(prompt: tuple[int, ...], first: Answered, second: Answered, hashes: tuple[int, ...]) -> ProbeFacts:
    """Both answers side by side."""
    return ProbeFacts(
        prompt_tokens=len(prompt),
        first_s=first.seconds,
        second_s=second.seconds,
        usage_seen=first.usage.prompt_tokens is not None,
        counted_prompt_tokens=first.usage.prompt_tokens,
        cached_first=first.usage.cached_tokens,
        cached_second=second.usage.cached_tokens,
        block_hashes=hashes,
    )


def decoded(connector: Connector, payload: bytes) -> DecodedBatch | str:
    """The batch, or what is wrong with it."""
    try:
        return connector.decode_events(payload)
    except MalformedEvents as error:
        return str(error)
    except (msgspec.DecodeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def stored_of(prompt: tuple[int, ...], events: tuple[KvEvent, ...]) -> tuple[BlocksStored, ...]:
    """The events that announce leading blocks of this very prompt."""
    wanted = np.array(prompt, dtype=np.uint32)
    return tuple(
        event
        for event in events
        if isinstance(event, BlocksStored)
        and event.token_ids is not None
        and len(event.token_ids)
        and event.parent is None
        and np.array_equal(wanted[: len(event.token_ids)], event.token_ids)
    )


def block_sizes(events: tuple[KvEvent, ...]) -> set[int]:
    """In tokens, as the events carry them."""
    return {event.block_size_tokens for event in events if isinstance(event, BlocksStored)}
