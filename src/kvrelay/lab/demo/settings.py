"""How the demo shrinks a trace to what mock workers can show in a minute."""

from __future__ import annotations

import msgspec

from kvrelay.core.traces.cut import CutRule
from kvrelay.core.traces.trace import Trace
from kvrelay.lab.arms.contender import Contender
from kvrelay.lab.arms.settings import MockFleetSettings, RunSettings

FLEET_BLOCKS = 20_000  # of all workers together: the demo's trace fits into the fleet, but not into one worker
LEAST_BLOCKS = 1_600  # of one worker: the longest request and its answer
LONGEST_TOKENS = 24_576  # of one request, as it is sent
REPLAY_MS = 3_000.0  # a trace without sessions is squeezed into this time
MAX_REQUESTS_WITHOUT_SESSIONS = 105


def settings_for(trace: Trace, *, workers: int, repeats: int, policies: tuple[str, ...], seed: int) -> RunSettings:
    """The bundled trace's settings, with what must follow from another trace's block size and times."""
    fleet = MockFleetSettings(workers=workers, blocks=max(LEAST_BLOCKS, FLEET_BLOCKS // workers))
    settings = RunSettings(
        contenders=tuple(Contender.of_policy(policy) for policy in policies), repeats=repeats, seed=seed, fleet=fleet
    )
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
