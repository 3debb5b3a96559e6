"""What a worker's first requests cost after a restart, on a mock worker that is restarted in the middle of a replay."""

from __future__ import annotations

import pytest

from kvrelay.core.traces.plan import Scale, make_plan
from kvrelay.core.traces.presets import BLOCK_TOKENS, preset
from kvrelay.edge.worker.launch import MockFleet
from kvrelay.edge.worker.spec import MockSpec
from kvrelay.lab.replay.client import CompletionClient
from kvrelay.lab.replay.first_wave import first_wave
from kvrelay.lab.replay.replay import Arm, replay
from kvrelay.lab.replay.sample import Sample


def sample(number: int, worker: str, ttft_ms: float | None, cached: int | None = 0) -> Sample:
    sent_ms = number * 10.0
    return Sample(
        arm="a", policy="p", repeat=0, request_id=str(number), session_id="s", turn=0, due_ms=sent_ms, sent_ms=sent_ms,
        ended_ms=sent_ms + 9, first_token_ms=None if ttft_ms is None else sent_ms + ttft_ms, ttft_ms=ttft_ms,
        worker=worker, prompt_tokens=100, cached_tokens=cached,
    )  # fmt: skip


def test_only_what_the_new_life_answered_counts() -> None:
    samples = [
        sample(0, "w", 1.0, 90),  # before the restart
        *(sample(number, "w", 50.0) for number in (5, 6)),
        sample(7, "w", None),  # an answer without content
        sample(8, "other", 1.0, 90),
        *(sample(number, "w", 10.0, 80) for number in (9, 10, 11)),
    ]

    found = first_wave(samples, worker="w", since_ms=50.0, wave_requests=2)

    assert (found.wave_requests, found.wave_ttft_ms.count, found.steady_ttft_ms.count) == (2, 2, 3)
    assert (found.ratio, found.wave_hit_share, found.steady_hit_share) == (5.0, 0.0, 0.8)
    nothing = first_wave(samples, worker="absent", since_ms=0.0)
    assert (nothing.ratio, nothing.wave_hit_share) == (None, None)


@pytest.mark.covers("BM-34")
async def test_a_worker_that_just_started_is_cold_first_and_warm_later() -> None:
    """Five prefixes over and over: the first request of each is computed, the others are not."""
    scale = Scale(BLOCK_TOKENS, time_divisor=20.0, max_output_tokens=1)
    plan = make_plan(preset("prefix_repetition").trace, scale, seed=1)
    samples: list[Sample] = []
    async with MockFleet([MockSpec(name=name, prefill_tokens_per_s=20_000.0) for name in ("m", "other")]) as fleet:
        urls = [worker.url for worker in fleet.workers]
        async with CompletionClient(*urls, timeout_s=20.0) as client:
            await replay(plan, client, arm=Arm("none", 0), model="mock-model", on_sample=samples.append)

    for url in urls:
        wave = first_wave(samples, worker=url, since_ms=0.0, wave_requests=5)
        assert (wave.wave_ttft_ms.count, wave.steady_ttft_ms.count) == (5, 45)
        assert wave.wave_hit_share is not None and wave.steady_hit_share is not None
        assert wave.wave_hit_share < 0.5 < wave.steady_hit_share
        assert wave.ratio is not None and wave.ratio > 1.0
