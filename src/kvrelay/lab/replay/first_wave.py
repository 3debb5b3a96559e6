"""The first requests that a worker answers after it started, beside what it does later: the price of a cold start.

It is paid after every restart and at every scale-out, and an average over a long run hides it.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from kvrelay.core.stats.distribution import Distribution, distribution
from kvrelay.lab.replay.sample import Sample


class FirstWave(Struct, frozen=True):
    """Of one worker. `steady` is everything after its first `wave_requests` answers with content."""

    worker: str
    wave_requests: int
    wave_ttft_ms: Distribution
    steady_ttft_ms: Distribution
    wave_hit_share: float | None  # cached of prompt tokens, where the engine reports both
    steady_hit_share: float | None

    @property
    def ratio(self) -> float | None:
        """Median of the wave to the median after it."""
        first, later = self.wave_ttft_ms.p50, self.steady_ttft_ms.p50
        return round(first / later, 3) if first is not None and later else None


def first_wave(samples: Sequence[Sample], *, worker: str, since_ms: float, wave_requests: int = 10) -> FirstWave:
    """`since_ms` on the arm's clock: when the worker became ready. Requests sent before went to its earlier life."""
    own = [sample for sample in samples if sample.worker == worker and sample.ok and sample.sent_ms >= since_ms]
    answered = sorted((s for s in own if s.ttft_ms is not None), key=lambda sample: sample.sent_ms)
    wave, steady = answered[:wave_requests], answered[wave_requests:]
    return FirstWave(worker, len(wave), _ttft(wave), _ttft(steady), _hit_share(wave), _hit_share(steady))


def _ttft(samples: Sequence[Sample]) -> Distribution:
    return distribution([sample.ttft_ms for sample in samples if sample.ttft_ms is not None])


def _hit_share(samples: Sequence[Sample]) -> float | None:
    counted = [s for s in samples if s.cached_tokens is not None and s.prompt_tokens]
    prompt_tokens = sum(sample.prompt_tokens or 0 for sample in counted)
    return round(sum(sample.cached_tokens or 0 for sample in counted) / prompt_tokens, 6) if prompt_tokens else None
