"""What a run of arms is asked to do. Everything here goes into the manifest before the first arm starts."""

from __future__ import annotations

from msgspec import Struct

from kvrelay.core.traces.cut import CutRule
from kvrelay.core.traces.plan import Scale
from kvrelay.edge.worker.spec import MockSpec

POLICIES = ("round_robin", "sticky", "cache_load")
LABEL = "mock"


class Weights(Struct, frozen=True):
    """Factors of the `weights` scorer under test, see `[policy.cache_load]`."""

    alpha: float
    beta: float
    gamma: float
    delta: float

    @property
    def name(self) -> str:
        """As it is written on the command line; the name of its arms."""
        return f"{self.alpha:g},{self.beta:g},{self.gamma:g},{self.delta:g}"


class Setup(Struct, frozen=True):
    """What makes one contender differ from the others: nothing but this."""

    policy: str
    scorer: str = "predict"
    weights: Weights | None = None


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
    """`cut` and `scale` shrink the trace so that all arms fit into a minute and a half."""

    policies: tuple[str, ...] = POLICIES
    repeats: int = 3
    seed: int = 1
    fleet: MockFleetSettings = MockFleetSettings()
    cut: CutRule = CutRule(max_context_tokens=98_304, max_turns_per_session=5, min_turns_per_session=3, max_sessions=24)
    scale: Scale = Scale(block_tokens=16, time_divisor=60.0, session_gap_ms=40.0, max_gap_ms=150.0, max_output_tokens=8)
    primer_prompts_per_worker: int = 2
    primer_tokens: int = 1024
    request_timeout_s: float = 60.0
    ready_timeout_s: float = 20.0
    setups: dict[str, Setup] = {}  # contenders that are more than the name of a policy

    def setup_of(self, contender: str) -> Setup:
        return self.setups.get(contender, Setup(contender))
