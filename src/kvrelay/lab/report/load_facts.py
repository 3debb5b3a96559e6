"""What a run shows about its load: whether it was an open loop, and what cold workers cost at the start of each arm."""

from __future__ import annotations

from kvrelay.lab.arms.measure import Measured
from kvrelay.lab.arms.settings import Reset
from kvrelay.lab.replay.first_wave import FirstWave, first_wave
from kvrelay.lab.replay.sample import Sample
from kvrelay.lab.replay.sending import Sending, sending


def sending_of(measured: Measured) -> dict[str, Sending]:
    """By contender, its repeats pooled."""
    cap = measured.manifest.stated.settings.max_in_flight
    samples: dict[str, list[Sample]] = {policy: [] for policy in measured.results}
    for data in measured.arms:
        samples[data.arm.policy] += data.samples
    return {policy: sending(own, max_in_flight=cap) for policy, own in samples.items()}


def cold_starts(measured: Measured) -> dict[str, list[FirstWave]]:
    """By arm: of each of its workers, the first requests beside the later ones. Only where workers began with the arm
    (all they had seen before is the primer); empty for fleets that ran before."""
    if measured.manifest.stated.settings.reset is not Reset.FRESH_PROCESSES:
        return {}
    return {
        data.arm.name: [first_wave(data.samples, worker=name, since_ms=0.0) for name in data.workers]
        for data in measured.arms
    }
