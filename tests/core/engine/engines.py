"""Drives an engine through virtual time, for the tests of this folder."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from kvrelay.core.engine.cost import StepCost
from kvrelay.core.engine.engine import (
    Engine,
    EngineEffect,
    EngineEvent,
    EngineSettings,
    Finished,
    PublishBatch,
    StepEnded,
    StepStarted,
    Submitted,
    TokenMade,
)
from kvrelay.core.engine.scheduler import SchedulerLimits
from kvrelay.core.engine.sequence import EngineRequest
from kvrelay.core.model.prompt import TokenIds

BLOCK = 4
E = TypeVar("E")


def make_engine(
    *, blocks: int = 64, token_budget: int = 2048, max_num_seqs: int = 8, max_model_len: int | None = None,
    model: str = "m", hash_seed: str = "0",
) -> Engine:  # fmt: skip
    """Blocks of 4 tokens; prefill 1000 tokens/s, decode 10 ms, overhead 1 ms."""
    return Engine(
        EngineSettings(
            model=model,
            block_size_tokens=BLOCK,
            blocks=blocks,
            max_model_len=max_model_len or blocks * BLOCK,
            limits=SchedulerLimits(token_budget=token_budget, max_num_seqs=max_num_seqs),
            cost=StepCost(prefill_tokens_per_s=1000.0, decode_ms=10.0, overhead_ms=1.0),
            hash_seed=hash_seed,
        )
    )


def tokens(count: int, *, start: int = 0) -> TokenIds:
    return np.arange(start, start + count, dtype=np.uint32)


def request(
    request_id: str, token_ids: TokenIds, max_tokens: int = 1, *, adapter: str | None = None, salt: str | None = None
) -> EngineRequest:
    return EngineRequest(request_id=request_id, token_ids=token_ids, max_tokens=max_tokens, adapter=adapter, salt=salt)


class Drive:
    """One engine with its clock; `effects` holds everything so far, in order."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.now_s = 0.0
        self.under_way: StepStarted | None = None
        self.effects: list[EngineEffect] = []

    def send(self, event: EngineEvent) -> tuple[EngineEffect, ...]:
        """One event now; invariants are checked after it."""
        effects = self.engine.step(self.now_s, event)
        self.engine.check()
        self.effects += effects
        for effect in effects:
            if isinstance(effect, StepStarted):
                self.under_way = effect
        return effects

    def submit(self, *requests: EngineRequest) -> None:
        for entry in requests:
            self.send(Submitted(entry))

    def end_step(self) -> tuple[EngineEffect, ...]:
        """Let the step under way end."""
        step = self.under_way
        assert step is not None, "no step is under way"
        self.under_way = None
        self.now_s = step.ends_at_s
        return self.send(StepEnded(step.step))

    def run(self) -> None:
        """Until nothing is left to do."""
        while self.under_way is not None:
            self.end_step()

    def complete(self, entry: EngineRequest) -> Finished:
        """Submit, run to the end, and say how it ended."""
        self.submit(entry)
        self.run()
        return next(end for end in self.all(Finished) if end.request_id == entry.request_id)

    def all(self, kind: type[E]) -> list[E]:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def take_batches(self) -> list[PublishBatch]:
        """Batches since the last call."""
        batches = self.all(PublishBatch)
        self.effects = [effect for effect in self.effects if not isinstance(effect, PublishBatch)]
        return batches

    def output(self, request_id: str) -> bytes:
        return bytes(made.token_id for made in self.all(TokenMade) if made.request_id == request_id)
