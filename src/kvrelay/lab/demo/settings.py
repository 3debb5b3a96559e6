"""What a demo run is asked to do. Everything here goes into the manifest before the first arm starts."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from kvrelay.core.traces.cut import CutRule
from kvrelay.core.traces.plan import Scale
from kvrelay.core.traces.trace import Trace
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


class DemoSettings(Struct, frozen=True):
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


FLEET_BLOCKS = 20_000  # of all workers together: the demo's trace fits into the fleet, but not into one worker
LEAST_BLOCKS = 1_600  # of one worker: the longest request and its answer
LONGEST_TOKENS = 24_576  # of one request, as it is sent
REPLAY_MS = 3_000.0  # a trace without sessions is squeezed into this time
MAX_REQUESTS_WITHOUT_SESSIONS = 105


def settings_for(trace: Trace, *, workers: int, repeats: int, policies: tuple[str, ...], seed: int) -> DemoSettings:
    """The bundled trace's settings, with what must follow from another trace's block size and times."""
    fleet = MockFleetSettings(workers=workers, blocks=max(LEAST_BLOCKS, FLEET_BLOCKS // workers))
    settings = DemoSettings(policies=policies, repeats=repeats, seed=seed, fleet=fleet)
    longest_tokens = LONGEST_TOKENS // settings.scale.block_tokens * trace.block_size_tokens
    if any(len(session.turns) > 1 for session in trace.sessions):
        return msgspec.structs.replace(
            settings, cut=msgspec.structs.replace(settings.cut, max_context_tokens=longest_tokens)
        )
    block_tokens = _whole_blocks(trace.block_size_tokens // 8, fleet.block_size_tokens)
    longest_tokens = LONGEST_TOKENS // block_tokens * trace.block_size_tokens
    limit = CutRule(max_context_tokens=longest_tokens, max_requests=MAX_REQUESTS_WITHOUT_SESSIONS)
    starts = [session.start_ms for session in trace.sessions[: limit.max_requests]]
    divisor = max(1.0, (max(starts) - min(starts)) / REPLAY_MS) if starts else 1.0
    scale = msgspec.structs.replace(
        settings.scale, block_tokens=block_tokens, time_divisor=divisor, session_gap_ms=None
    )
    return msgspec.structs.replace(settings, cut=limit, scale=scale)


def _whole_blocks(tokens: int, block_size_tokens: int) -> int:
    """The nearest number of whole blocks below, from one to four blocks."""
    return max(1, min(4, tokens // block_size_tokens)) * block_size_tokens
