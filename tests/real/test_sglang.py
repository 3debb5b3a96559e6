"""SGLang's own radix cache, event recorder, publisher and replay, live, against our subscriber, decoder and index.

Its server cannot run without a GPU toolchain; this is the part of it that says what is cached (`sglang_cache.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvrelay.core.contract.keys import Keyer
from kvrelay.core.index.residency import Residency
from kvrelay.core.model.events import EventsSkipped
from kvrelay.edge.connectors.base import EventSource
from kvrelay.edge.connectors.registry import CONNECTORS
from kvrelay.edge.connectors.vllm.replay import Replayed, replay
from kvrelay.edge.connectors.vllm.subscriber import EventSubscriber
from tests.real.engine import EngineUnavailable, installed
from tests.real.llamacpp import run_logged

pytestmark = [pytest.mark.real, pytest.mark.timeout(900), pytest.mark.covers("TP-02")]

VERSION = "0.5.23"
PAGE = 4
ANSWER_TIMEOUT_S = 300.0  # the first import takes a while
Message = tuple[int, bytes]


def packages() -> tuple[Path, Path]:
    """The Python that has torch (vLLM's), and where SGLang lies: installed on first use, outside the checkout."""
    cache = Path(os.environ.get("TEST_SGLANG_CACHE", Path.home() / f".cache/kvrelay/sglang-{VERSION}"))
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / "packages"
    if not (cache / "installed").exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target)]
        run_logged([*command, f"sglang=={VERSION}"], cache / "install.log")
        (cache / "installed").touch()
    return installed().python, target


class Cache:
    """The process with SGLang's cache in it; one order, one answer."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, **order: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        await self._process.stdin.drain()
        return await self.answer()

    async def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), ANSWER_TIMEOUT_S)
        result: dict[str, Any] = json.loads(line)
        return result


class Index:
    """Ours: one worker."""

    def __init__(self) -> None:
        self._keyer = Keyer(b"test")
        self._residency = Residency(self._keyer)
        self._slot = self._residency.add_holder(PAGE)
        self.skipped = 0

    def apply(self, message: Message) -> None:
        for event in CONNECTORS["sglang"].decode_events(message[1]).events:
            if isinstance(event, EventsSkipped):
                self.skipped += 1
            else:
                self._residency.apply(self._slot, event)
        self._residency.check()

    def tokens(self, prompt: list[int], salt: str | None) -> int:
        keys = self._keyer.prompt_keys(prompt, PAGE, salt=salt)
        return int(self._residency.depths(keys)[self._slot]) * PAGE


@asynccontextmanager
async def running(folder: Path, context: zmq.Context) -> AsyncIterator[tuple[Cache, EventSource, list[Message]]]:
    """The cache, where it publishes, and what came of it, from the first batch on."""
    try:
        python, target = packages()
    except EngineUnavailable as reason:
        pytest.fail(f"SGLang's cache cannot run here: {reason}", pytrace=False)
    source = EventSource(0, f"ipc://{folder}/events", f"ipc://{folder}/replay", "kv@m")
    script = Path(__file__).with_name("sglang_cache.py")
    process = await asyncio.create_subprocess_exec(
        *(str(python), str(script), str(target), source.endpoint, str(source.replay), str(PAGE)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    connected, received = asyncio.Event(), list[Message]()
    try:
        cache = Cache(process)
        assert await cache.answer() == {"ready": True}
        subscriber = EventSubscriber(
            context,
            source,
            on_message=lambda topic, seq, payload: received.append((seq, payload)),
            on_malformed=pytest.fail,
            on_connected=connected.set,
        )
        await connected.wait()
        await asyncio.sleep(0.5)  # the publisher learns of the subscription a little after the handshake
        try:
            yield cache, source, received
        finally:
            subscriber.close()
    finally:
        process.kill()
        await process.wait()


async def until(received: list[Message], count: int) -> None:
    async with asyncio.timeout(60):
        while len(received) < count:  # noqa: ASYNC110  the subscriber tells by callback only
            await asyncio.sleep(0.01)


def prompts(seed: int) -> list[tuple[list[int], str | None]]:
    """A family of prompts with common heads, some of them of another tenant."""
    chance = random.Random(seed)
    found: list[list[int]] = [[chance.randrange(1000) for _ in range(40)]]
    while len(found) < 24:
        head = chance.choice(found)
        head = head[: chance.randrange(len(head) + 1)]
        found.append([*head, *(chance.randrange(1000) for _ in range(chance.randrange(1, 40)))])
    return [(tokens, salt) for tokens in found for salt in (None, "pepper")]


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context: zmq.Context = zmq.Context()
    yield context
    context.destroy(linger=0)


async def test_what_we_claim_is_what_its_radix_tree_matches(tmp_path: Path, context: zmq.Context) -> None:
    chance, family, index = random.Random(11), prompts(11), Index()
    async with running(tmp_path, context) as (cache, source, received):
        applied = 0
        for step in range(120):
            tokens, salt = chance.choice(family)
            draw = chance.random()
            if draw < 0.65:
                done = await cache.ask(insert=tokens, salt=salt)
            elif draw < 0.98:
                done = await cache.ask(evict=chance.randrange(1, 40))
            else:
                done = await cache.ask(reset=True)
            await until(received, done["batches"])
            for message in received[applied:]:
                index.apply(message)
            applied = len(received)
            if step % 6 == 0:
                for tokens, salt in family:
                    matched = (await cache.ask(match=tokens, salt=salt))["tokens"]
                    assert index.tokens(tokens, salt) == matched, (step, tokens, salt)
        assert [seq for seq, _ in received] == list(range(len(received))) and len(received) > 60
        assert index.skipped == 0
        answer = await replay(context, str(source.replay), topic="kv@m", from_seq=10, timeout_s=30)
        assert answer == Replayed(tuple(received[10:]))
