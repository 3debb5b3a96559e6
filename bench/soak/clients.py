"""What is sent: many conversations at once, each a closed loop of streamed turns, some of them left half-way.

A conversation grows by every turn and ends after a few; all of them begin with one of a few shared openings. Whoever
sends knows nothing of what is being broken meanwhile.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextvars import ContextVar

import aiohttp
import msgspec
import numpy as np

from bench.soak.undisturbed import undisturbed_text
from kvrelay.core.model.prompt import TokenIds
from kvrelay.lab.replay.client import CompletionClient, Outcome, completion_body

PAUSE_AFTER_FAILURE_S = 0.05


class Habits(msgspec.Struct, frozen=True, kw_only=True):
    """How clients behave."""

    seed: int
    model: str = "mock-model"
    block_size_tokens: int = 16
    vocabulary: int = 200_000
    openings: int = 16
    opening_tokens: int = 256
    turn_tokens: tuple[int, int] = (40, 120)
    max_tokens: tuple[int, int] = (8, 40)
    turns: int = 5
    abort_ratio: float = 0.08
    abort_after_s: tuple[float, float] = (0.01, 1.0)


class Sent(msgspec.Struct):
    """One request as its client saw it. `outcome` is null where the client left before the answer was complete."""

    request_id: str
    session_id: str
    max_tokens: int
    written: bool = False  # its bytes were handed to a connection; a client can leave before
    outcome: Outcome | None = None
    right_text: bool | None = None  # of a complete answer: as an undisturbed worker would have said it

    @property
    def broken(self) -> bool:
        """The client stayed and got no complete answer."""
        return self.outcome is not None and self.outcome.failure is not None

    @property
    def begun(self) -> bool:
        """The client had the head of an answer, which the gateway sends with the first byte of the body."""
        return self.outcome is not None and self.outcome.http_status == 200


_asking: ContextVar[Sent] = ContextVar("asking")


class WatchedClient(CompletionClient):
    """Notes when the bytes of a request have been handed to a connection."""

    async def __aenter__(self) -> WatchedClient:
        await super().__aenter__()
        assert self._session is not None
        tracing = aiohttp.TraceConfig()
        tracing.on_request_chunk_sent.append(_note_written)
        tracing.freeze()
        self._session.trace_configs.append(tracing)
        return self


async def _note_written(session: aiohttp.ClientSession, context: object, sent: object) -> None:
    _asking.get().written = True


class Conversation:
    """Grows turn by turn; the same seed and number give the same prompts."""

    def __init__(self, habits: Habits, number: int) -> None:
        self._habits = habits
        self._chance = np.random.default_rng([habits.seed, 1, number])
        self.session_id = f"conversation-{number}"
        opening = int(self._chance.integers(habits.openings))
        shared = np.random.default_rng([habits.seed, 0, opening])
        self.prompt: TokenIds = shared.integers(habits.vocabulary, size=habits.opening_tokens, dtype=np.uint32)

    def next_turn(self) -> TokenIds:
        more = int(self._chance.integers(*self._habits.turn_tokens))
        self.prompt = np.append(self.prompt, self._chance.integers(self._habits.vocabulary, size=more, dtype=np.uint32))
        return self.prompt


class Crowd:
    """`streams` clients; `run()` keeps each of them busy until the time is over and then lets the last answers come."""

    def __init__(self, client: CompletionClient, habits: Habits, *, streams: int) -> None:
        self._client = client
        self._habits = habits
        self._streams = streams
        self._conversations = 0
        self.sent: list[Sent] = []
        self.open_streams = 0
        self.prompts: dict[int, TokenIds] = {}  # the last one of every client

    async def run(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        await asyncio.gather(*(self._be_client(number, until_s) for number in range(self._streams)))

    async def repeat_prompts(self, label: str, *, at_once: int) -> list[Sent]:
        """Every client's last prompt once more, undisturbed."""
        gate = asyncio.Semaphore(at_once)

        async def repeat(number: int, prompt: TokenIds) -> Sent:
            async with gate:
                sent = Sent(f"{label}-{number}", f"{label}-{number}", 2)
                sent.outcome = await self._complete(sent, prompt)
                return sent

        sent = await asyncio.gather(*(repeat(number, prompt) for number, prompt in self.prompts.items()))
        self.sent += sent
        return list(sent)

    async def _be_client(self, number: int, until_s: float) -> None:
        chance = random.Random(f"{self._habits.seed}/{number}")
        while time.monotonic() < until_s:
            conversation = Conversation(self._habits, self._conversations)
            self._conversations += 1
            for _ in range(self._habits.turns):
                if time.monotonic() >= until_s:
                    return
                self.prompts[number] = conversation.next_turn()
                if not await self._take_turn(conversation, chance):
                    await asyncio.sleep(PAUSE_AFTER_FAILURE_S)

    async def _take_turn(self, conversation: Conversation, chance: random.Random) -> bool:
        """False: the answer was broken."""
        habits = self._habits
        sent = Sent(f"soak-{len(self.sent)}", conversation.session_id, chance.randint(*habits.max_tokens))
        self.sent.append(sent)
        patience_s = chance.uniform(*habits.abort_after_s) if chance.random() < habits.abort_ratio else None
        asking = asyncio.ensure_future(self._complete(sent, conversation.prompt))
        self.open_streams += 1
        try:
            await asyncio.wait((asking,), timeout=patience_s)
            if asking.done():
                sent.outcome = asking.result()
            else:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
        finally:
            self.open_streams -= 1
        return not sent.broken

    async def _complete(self, sent: Sent, prompt: TokenIds) -> Outcome:
        _asking.set(sent)
        body = completion_body(self._habits.model, prompt, sent.max_tokens)
        outcome = await self._client.complete(body, request_id=sent.request_id, session_id=sent.session_id)
        if outcome.failure is None:
            model, size = self._habits.model, self._habits.block_size_tokens
            undisturbed = undisturbed_text(prompt, sent.max_tokens, model=model, block_size_tokens=size)
            sent.right_text = outcome.text == undisturbed
        outcome.text = ""  # judged, and many of them are kept
        return outcome
