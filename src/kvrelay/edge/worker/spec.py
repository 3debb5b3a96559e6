"""What a mock worker is told at its start, and what it says when it is ready."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from kvrelay.core.engine.cost import StepCost
from kvrelay.core.engine.engine import EngineSettings
from kvrelay.core.engine.scheduler import SchedulerLimits

DEFAULT_MAX_MODEL_LEN = 32_768


class MockSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker process. Port 0 and `auto` endpoints take free loopback ports."""

    name: str = "mock-0"
    host: str = "127.0.0.1"
    port: int = 0
    model: str = "mock-model"
    adapters: tuple[str, ...] = ()
    vocab_size: int = 200_000
    block_size_tokens: int = 16
    blocks: int = 4096
    max_model_len: int | None = None  # None: the pool's capacity, at most DEFAULT_MAX_MODEL_LEN
    prefill_tokens_per_s: float = 8000.0
    decode_ms: float = 8.0
    step_overhead_ms: float = 0.2
    max_num_seqs: int = 128
    token_budget: int = 2048
    reply_tokens: int = 128  # where a chat without `max_tokens` ends by itself
    events: str = "auto"  # auto | none | a ZMQ endpoint
    events_mode: str = "bind"  # bind | connect
    replay: str = "auto"  # auto | none | a ZMQ endpoint
    replay_buffer_batches: int = 10_000
    hash_seed: str = "0"
    seed: int = 0  # chance of faults with a probability
    drain_s: float = 30.0
    insecure: bool = False  # allow listeners beyond loopback
    faults: tuple[dict[str, Any], ...] = ()  # switched on from the start, see `faults.py`

    @property
    def capacity_tokens(self) -> int:
        return self.blocks * self.block_size_tokens

    @property
    def context_tokens(self) -> int:
        """`max_model_len` with its default filled in."""
        if self.max_model_len is not None:
            return self.max_model_len
        return min(DEFAULT_MAX_MODEL_LEN, self.capacity_tokens)

    @property
    def topic(self) -> str:
        return f"kv@{self.name}@{self.model}"

    def engine_settings(self) -> EngineSettings:
        return EngineSettings(
            model=self.model,
            block_size_tokens=self.block_size_tokens,
            blocks=self.blocks,
            max_model_len=self.context_tokens,
            limits=SchedulerLimits(token_budget=self.token_budget, max_num_seqs=self.max_num_seqs),
            cost=StepCost(
                prefill_tokens_per_s=self.prefill_tokens_per_s,
                decode_ms=self.decode_ms,
                overhead_ms=self.step_overhead_ms,
            ),
            hash_seed=self.hash_seed,
        )


class MockReady(Struct, frozen=True, kw_only=True):
    """The line that a worker prints once it serves. `events` and `replay` are endpoints to connect to, or null."""

    name: str
    url: str
    events: str | None
    replay: str | None
    pid: int
    incarnation: str
    topic: str | None
    model: str
    block_size_tokens: int
    mock: bool = True
