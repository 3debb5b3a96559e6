"""How far results reach: what they were measured on decides it, and no flag changes it.

Layers: A, mock workers, in which every time follows from stated rates; B, one worker, where nothing can be routed; C,
two or more real workers. Only layer C on GPUs can promote a complex policy over a simple one.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct

MIN_REPEATS = 3
MIN_ANSWERED = 20  # per arm and repeat pooled: the p95 of fewer is the slowest request
LATE_SENDER_MS = 50.0  # p99; beyond it our own client is part of what was measured


class Layer(StrEnum):
    MOCK = "A"
    ONE_WORKER = "B"
    FLEET = "C"


class Hardware(StrEnum):
    MOCK = "mock"
    CPU = "cpu"
    GPU = "gpu"
    UNKNOWN = "unknown"


LABELS = {Layer.MOCK: "mock", Layer.ONE_WORKER: "single_worker_baseline", Layer.FLEET: "routing_result"}
"""What results may be called. Nothing of layers A and B is ever a routing result."""


class Registration(StrEnum):
    """Whether the gates were fixed before the first request."""

    REGISTERED = "registered"
    UNLOCKED = "unlocked"
    CHANGED = "changed"
    LATE = "locked_too_late"
    NO_GATES = "no_gates"

    @property
    def pre_registered(self) -> bool:
        return self is Registration.REGISTERED


class Evidence(Struct, frozen=True, kw_only=True):
    """What a verdict has to know about the run besides its figures."""

    layer: Layer
    hardware: Hardware
    registration: Registration
    repeats: int  # of the arm with the fewest
    answered_requests: int  # of the arm with the fewest, all repeats together
    contaminated_arms: Sequence[str] = ()
    unverified_arms: Sequence[str] = ()  # isolation could not be read from the engines' counters
    late_arms: Sequence[str] = ()  # our own client sent late
    unanswered_records: Sequence[str] = ()  # planned requests of which nothing was recorded, in words
    sameness_broken: Sequence[str] = ()  # arms that differ in more than one factor, or sent another schedule

    @property
    def label(self) -> str:
        return LABELS[self.layer]

    @property
    def modelled(self) -> bool:
        """Times are the model's, not an engine's."""
        return self.layer is Layer.MOCK

    def doubts(self) -> tuple[str, ...]:
        """Why the figures prove nothing, however they look; empty when they may."""
        found = []
        if self.repeats < MIN_REPEATS:
            found.append(f"{self.repeats} of at least {MIN_REPEATS} repeats")
        if self.answered_requests < MIN_ANSWERED:
            found.append(f"an arm has {self.answered_requests} answered requests, fewer than {MIN_ANSWERED}")
        for arms, what in (
            (self.contaminated_arms, "did not start with empty caches"),
            (self.unverified_arms, "may not have started with empty caches: no engine counter says so"),
            (self.late_arms, f"was sent late by our own client (p99 above {LATE_SENDER_MS:g} ms)"),
        ):
            found += [f"{arm} {what}" for arm in arms]
        return (*found, *self.unanswered_records, *self.sameness_broken)


def layer_of(*, mock: bool, workers: int) -> Layer:
    if mock:
        return Layer.MOCK
    return Layer.FLEET if workers >= 2 else Layer.ONE_WORKER


def hardware_of(workers: Sequence[Hardware]) -> Hardware:
    """Of a fleet: the least of its workers'. One mock makes a mock fleet, one unknown leaves it unknown."""
    for worst in (Hardware.MOCK, Hardware.UNKNOWN, Hardware.CPU, Hardware.GPU):
        if worst in workers:
            return worst
    return Hardware.UNKNOWN
