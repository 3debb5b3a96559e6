"""A preset in blocks on real mock workers: caches are emptied and workers restarted between the blocks."""

from __future__ import annotations

from collections import defaultdict
from contextlib import AsyncExitStack

import aiohttp
import pytest

from kvrelay.core.traces.plan import Scale, make_plan
from kvrelay.core.traces.presets import BLOCK_TOKENS, Phase, preset
from kvrelay.edge.worker.launch import MockFleet
from kvrelay.edge.worker.spec import MockSpec
from kvrelay.lab.replay.client import CompletionClient
from kvrelay.lab.replay.phases import replay_in_phases
from kvrelay.lab.replay.replay import Arm
from kvrelay.lab.replay.sample import Sample


@pytest.mark.covers("BM-11")
async def test_cold_hits_nothing_warm_everything_restart_nothing() -> None:
    made = preset("cold_warm_restart")
    plan = make_plan(made.trace, Scale(BLOCK_TOKENS, time_divisor=60.0, max_output_tokens=2), seed=42)
    samples: dict[str, list[Sample]] = defaultdict(list)
    before: list[str] = []

    async with AsyncExitStack() as stack:
        running: list[tuple[MockFleet, CompletionClient]] = []

        async def prepare(phase: Phase) -> CompletionClient:
            before.append(phase.before)
            if not running or phase.before == "restart":
                fleet = await stack.enter_async_context(MockFleet([MockSpec(name="m", prefill_tokens_per_s=1e6)]))
                client = CompletionClient(fleet.workers[0].url, timeout_s=10.0)
                running.append((fleet, await stack.enter_async_context(client)))
            fleet, client = running[-1]
            if phase.before == "reset":
                url = f"{fleet.workers[0].url}/reset_prefix_cache"
                async with aiohttp.ClientSession() as http, http.post(url) as answer:
                    assert answer.status == 200
            return client

        await replay_in_phases(
            plan,
            made.phases,
            prepare=prepare,
            arm=Arm("none", 0),
            model="mock-model",
            on_sample=lambda sample: samples[sample.phase].append(sample),
        )

    assert before == ["reset", "nothing", "restart"] * 2
    assert list(samples) == ["cold-1", "warm-1", "restart-1", "cold-2", "warm-2", "restart-2"]
    hits = {phase: {sample.cached_tokens for sample in own} for phase, own in samples.items()}
    whole = {1024 - BLOCK_TOKENS}  # the last block is always computed, so that there is something to sample from
    wanted = {"cold": {0}, "warm": whole, "restart": {0}}
    assert hits == {f"{name}-{number}": tokens for number in (1, 2) for name, tokens in wanted.items()}
    assert all(sample.ok and sample.planned_ms is not None for own in samples.values() for sample in own)
    assert min(sample.due_ms for sample in samples["warm-2"]) == 0.0
