"""How a trace is sent to workers that exist: as it is, unless somebody asks for less."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from kvrelay.core.traces.cut import CutRule
from kvrelay.core.traces.plan import Scale
from kvrelay.core.traces.trace import Trace
from kvrelay.lab.arms.fleets import ArmWorker
from kvrelay.lab.arms.settings import RunSettings

REQUEST_TIMEOUT_S, READY_TIMEOUT_S = 600.0, 120.0


class Wishes(Struct, frozen=True, kw_only=True):
    """What the command line may change about cut and scale; None: as it is."""

    speed: float | None = None
    block_tokens: int | None = None
    max_requests: int | None = None
    max_sessions: int | None = None
    sample_seed: int | None = None
    max_turns: int | None = None
    max_context_tokens: int | None = None
    max_gap_ms: float | None = None
    max_output_tokens: int | None = None


def wished(settings: RunSettings, wishes: Wishes) -> RunSettings:
    """`settings` with what was wished for."""
    cut = {
        "max_requests": wishes.max_requests,
        "max_sessions": wishes.max_sessions,
        "sample_seed": wishes.sample_seed,
        "max_turns_per_session": wishes.max_turns,
        "max_context_tokens": wishes.max_context_tokens,
    }
    scale = {
        "time_divisor": wishes.speed,
        "block_tokens": wishes.block_tokens,
        "max_gap_ms": wishes.max_gap_ms,
        "max_output_tokens": wishes.max_output_tokens,
    }
    return msgspec.structs.replace(
        settings,
        cut=msgspec.structs.replace(settings.cut, **_given(cut)),
        scale=msgspec.structs.replace(settings.scale, **_given(scale)),
    )


def standing_settings(trace: Trace, workers: Sequence[ArmWorker], wishes: Wishes) -> RunSettings:
    """At the trace's own pace and size; turns that do not fit the model are cut, with all that follow them."""
    block_tokens = wishes.block_tokens or trace.block_size_tokens
    lengths = [worker.max_model_len for worker in workers if worker.max_model_len is not None]
    longest = min(lengths) // block_tokens * trace.block_size_tokens if lengths else None
    settings = RunSettings(
        cut=CutRule(max_context_tokens=longest),
        scale=Scale(block_tokens=block_tokens),
        primer_prompts_per_worker=1,
        primer_tokens=min(1024, (min(lengths) if lengths else 1024) // 2),
        request_timeout_s=REQUEST_TIMEOUT_S,
        ready_timeout_s=READY_TIMEOUT_S,
    )
    return wished(settings, wishes)


def _given(values: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not None}
