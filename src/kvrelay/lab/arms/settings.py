"""What a run of arms is asked to do. Everything here goes into the manifest before the first arm starts."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from kvrelay.core.traces.cut import CutRule
from kvrelay.core.traces.plan import Scale
from kvrelay.edge.worker.spec import MockSpec
from kvrelay.lab.arms.contender import Contender

POLICIES = ("round_robin", "sticky", "cache_load")


class Reset(StrEnum):
    """How an arm gets rid of what earlier arms left in the caches. The router's index is new in every arm anyway."""

    FRESH_PROCESSES = "fresh_processes"
    PREFIX_CACHE = "reset_prefix_cache"  # the engine's own order, through the gateway's admin port
    CACHE_SALT = "cache_salt"  # earlier blocks stay, and no request of this arm can hit them
    NONE = "none"  # for showing what happens then: such arms are flagged


class Order(StrEnum):
    LATIN = "latin"
    ABBA = "abba"


class MockFleetSettings(Struct, frozen=True):
    """The fleet that every arm gets anew. The pool is smaller than the trace on purpose: one worker cannot hold it."""

    workers: int = 4
    block_size_tokens: int = 16
    blocks: int = 5000
    prefill_tokens_per_s: float = 60_000.0
    decode_ms: float = 4.0
    token_budget: int = 1024
    model: str = "mock-model"

    def specs(self) -> list[MockSpec]:
        return [
            MockSpec(
                name=f"mock-{number}",
                model=self.model,
                block_size_tokens=self.block_size_tokens,
                blocks=self.blocks,
                max_model_len=(self.blocks - 1) * self.block_size_tokens,
                prefill_tokens_per_s=self.prefill_tokens_per_s,
                decode_ms=self.decode_ms,
                token_budget=self.token_budget,
                drain_s=1.0,
            )
            for number in range(self.workers)
        ]


class RunSettings(Struct, frozen=True):
    """`cut` and `scale` shrink the trace so that all arms fit into the time that there is."""

    contenders: tuple[Contender, ...] = tuple(Contender.of_policy(policy) for policy in POLICIES)
    repeats: int = 3
    order: Order = Order.LATIN
    seed: int = 1
    fleet: MockFleetSettings = MockFleetSettings()  # where the arms run on mock workers
    reset: Reset = Reset.FRESH_PROCESSES
    cut: CutRule = CutRule(max_context_tokens=98_304, max_turns_per_session=5, min_turns_per_session=3, max_sessions=24)
    scale: Scale = Scale(block_tokens=16, time_divisor=60.0, session_gap_ms=40.0, max_gap_ms=150.0, max_output_tokens=8)
    max_in_flight: int | None = None  # a cap makes the load follow the fleet's speed: no open loop any more
    primer_prompts_per_worker: int = 2
    primer_tokens: int = 1024
    request_timeout_s: float = 60.0
    ready_timeout_s: float = 20.0

    @property
    def policies(self) -> tuple[str, ...]:
        """The contenders' names."""
        return tuple(contender.name for contender in self.contenders)

    def contender(self, name: str) -> Contender:
        return next(contender for contender in self.contenders if contender.name == name)
