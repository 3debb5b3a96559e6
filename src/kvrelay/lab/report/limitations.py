"""What a run cannot show. Printed by code from what the run was, so that nobody has to remember to say it."""

from __future__ import annotations

from kvrelay.core.gates.evidence import Hardware, Layer
from kvrelay.lab.arms.isolation import IsolationState
from kvrelay.lab.arms.measure import Measured
from kvrelay.lab.arms.results import sent_late
from kvrelay.lab.arms.settings import Reset

EXCLUDED_WORDS = {
    "over_long": "over-long",
    "after_over_long": "after an over-long one",
    "beyond_turn_limit": "beyond the limit of turns per session",
    "session_too_short": "in sessions that are too short",
    "session_not_sampled": "in sessions that were not sampled",
    "beyond_request_limit": "beyond the limit of requests",
}


def limitations(measured: Measured) -> tuple[str, ...]:
    return (*_of_the_fleet(measured), *_of_the_workload(measured), *_of_the_arms(measured))


def _of_the_fleet(measured: Measured) -> tuple[str, ...]:
    fleet = measured.manifest.stated.fleet
    if fleet.layer == Layer.MOCK.value:
        return (
            "All workers are mocks: times follow from stated prefill and decode rates. They show what routing does to "
            "queues and caches; they say nothing about the performance of an engine or a GPU.",
        )
    found = []
    if fleet.layer == Layer.ONE_WORKER.value:
        found.append("There was one worker: nothing could be routed, so this is a baseline and no routing result.")
    if fleet.hardware == Hardware.CPU.value:
        found.append("The workers ran on CPUs: ratios of prefill, decode and transfer are others on GPUs.")
    if fleet.hardware == Hardware.UNKNOWN.value:
        found.append("What hardware the workers run on could not be seen from here, so it is not claimed.")
    return tuple(found)


def _of_the_workload(measured: Measured) -> tuple[str, ...]:
    stated = measured.manifest.stated
    scale, trace = stated.settings.scale, stated.trace
    excluded = ", ".join(f"{count} {EXCLUDED_WORDS[reason]}" for reason, count in trace.excluded.items())
    found = [
        f"The workload is a filtered synthetic subset: {trace.requests_retained} of {trace.requests_received} requests"
        + (f" (left out: {excluded})." if excluded else "."),
    ]
    if (scale.block_tokens, scale.time_divisor) != (trace.block_size_tokens, 1.0):
        found.append(
            f"It is scaled: one block of {trace.block_size_tokens} tokens became {scale.block_tokens} tokens, times "
            f"were divided by {scale.time_divisor:g}"
            + (", pauses and answers capped." if scale.max_gap_ms is not None else ".")
        )
    found.append(
        "Prompts are made from block ids, so answers of earlier turns are new tokens to the engines: blocks that "
        "decoding filled are never hit here, while with real text they would be."
    )
    if stated.settings.max_in_flight is not None:
        found.append(
            f"At most {stated.settings.max_in_flight} requests were in flight: the load waited for the fleet, so this "
            "is not an open loop, and waiting before sending is not in the times from sending."
        )
    return (*found, *trace.limitations)


def _of_the_arms(measured: Measured) -> tuple[str, ...]:
    observed = measured.manifest.observed
    found = [
        f"{facts.arm} is {facts.isolation.state.value}: {facts.isolation.reason}."
        for facts in observed
        if facts.isolation.state is not IsolationState.CLEAN
    ]
    if measured.manifest.stated.settings.reset is Reset.CACHE_SALT:
        found.append(
            "Arms were kept apart by a cache salt: blocks of earlier arms stayed in the caches and were evicted first, "
            "which costs nothing but is not an empty cache."
        )
    late = [policy for policy, result in measured.results.items() if sent_late(result)]
    if late:
        found.append(f"Our own client sent late under {', '.join(late)}: a part of what was measured is this machine.")
    if any(result.requests_without_usage for result in measured.results.values()):
        found.append("Of some requests the engines did not say what they hit; they are in no token figure.")
    return tuple(found)
