"""Faults of the service that keeps the objects, as against those of one object in `faults.py`: it is slow, silent,
gone, full, or its writer dies. What must hold in every case is the same: never a wrong byte, the policy followed,
counted, and what is computed anew can be kept again.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from kvrelay.core.contract.identity import Namespace
from kvrelay.core.tiers.outcome import Outcome
from kvrelay.edge.stores.store import Store
from kvrelay.edge.stores.tiered import ChunkShape, FetchOutcome, TieredStore
from tests.conformance.stores.faults import counted

DEADLINE_MS = 500.0
PAUSE_S = 0.15  # of a slow service, well within the deadline
RETURN_S = 60.0  # a killed server may have to start again
PAYLOAD_BYTES = 1 << 20
SHAPE = ChunkShape(tokens=32, payload_bytes=PAYLOAD_BYTES, layers=2, dtype="bfloat16", shape=(2, 32, 1, 8192))
MOST_OBJECTS = 64
ROUNDS_OF_KILLS = 3
IN_THE_WRITER = "mooncake:"  # objects are kept in their writer's memory: for some seconds its master does not know


class Place(Protocol):
    """Somewhere to keep objects that can be treated badly. What cannot be done to it is said in `matrix.IMPOSSIBLE`."""

    url: str

    def open(self) -> Store: ...

    def stop(self) -> None:
        """It accepts and does not answer any more."""

    def go_on(self) -> None: ...

    def kill(self) -> None:
        """It is gone: everything is refused."""

    def restart(self) -> None: ...

    def fill(self) -> Store:
        """A store on it that has room for a few objects of ours, and no more."""

    def empty(self) -> None:
        """There is room again in what `fill` returned."""


def namespace(tenant: str) -> Namespace:
    return Namespace(b"c" * 32, tenant, tenant.encode(), 0)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def payload(number: int) -> bytes:
    return random.Random(number).randbytes(PAYLOAD_BYTES)


class Reader:
    """A tiered store over one place for one tenant."""

    def __init__(self, store: Store, tenant: str, **options: Any) -> None:
        config = {"deadline_ms": DEADLINE_MS, "probe_interval_s": 0.2, "break_even": False, "piece_bytes": 400_000}
        tiers = [{"url": "memory://", "promote": "never"}]
        self.tiered = TieredStore.open({"tiers": tiers, **config, **options}, stores=[store])
        self.space = namespace(tenant)

    def keep(self, number: int) -> Outcome:
        (outcome,) = self.tiered.store(self.space, key(number), SHAPE, [payload(number)]).by_tier.values()
        return outcome

    def load(self, numbers: Sequence[int]) -> FetchOutcome:
        """Fetch, told that they are there. Bytes of hits are compared."""
        plan = self.tiered.plan(self.space, [key(number) for number in numbers], SHAPE)
        into = [bytearray(PAYLOAD_BYTES) for _ in numbers]
        fetched = self.tiered.fetch(plan, [memoryview(buffer) for buffer in into])
        for number, outcome, buffer in zip(numbers, fetched.outcomes, into, strict=True):
            assert outcome is not Outcome.HIT or bytes(buffer) == payload(number), "a wrong byte is Ready"
        return fetched

    def one(self, number: int) -> Outcome:
        before = counted(self.tiered)
        (outcome,) = self.load([number]).outcomes
        assert counted(self.tiered)["fetch", outcome.value] > before["fetch", outcome.value], f"{outcome} not counted"
        return outcome

    def keeps_again(self, number: int, *, within_s: float = RETURN_S) -> None:
        """What was computed anew is kept and found, soon after the service is well again."""
        end_s = time.monotonic() + within_s
        while True:
            self.keep(number)
            if self.load([number]).ready:
                return
            assert time.monotonic() < end_s, "the service is well again and nothing can be kept"
            time.sleep(0.05)

    def close(self) -> None:
        self.tiered.close()


def slow(place: Place) -> set[Outcome]:
    """Everything waits, and is answered within the deadline."""
    reader = Reader(place.open(), "slow", deadline_ms=20 * DEADLINE_MS)
    reader.keeps_again(0)
    place.stop()
    waking = threading.Timer(PAUSE_S, place.go_on)
    waking.start()
    outcome = reader.one(0)
    waking.join()
    reader.keeps_again(1)
    reader.close()
    return {outcome}


def hung(place: Place) -> set[Outcome]:
    """Under both policies: the first load ends with the deadline, those after it at once."""
    seen: set[Outcome] = set()
    for policy in ("recompute", "fail"):
        reader = Reader(place.open(), f"hung-{policy}", failure_policy=policy)
        reader.keeps_again(0)
        place.stop()
        try:
            first = reader.load([0])
            plan = reader.tiered.lookup(reader.space, [key(0)], SHAPE)
            second = reader.load([0])
        finally:
            place.go_on()
        assert first.outcomes == (Outcome.TIMEOUT,) and second.ms < first.ms / 2, (first, second)
        assert plan.keys == () and plan.unasked == ("memory",), "silence was taken for absence"
        assert first.failed == second.failed == (policy == "fail")
        counts = counted(reader.tiered)
        assert counts["fetch", "timeout"] and counts["lookup", "unavailable"]
        seen |= {*first.outcomes, *second.outcomes}
        reader.keeps_again(1)
        reader.close()
    return seen


def refused(place: Place) -> set[Outcome]:
    """Under both policies: the service is gone, and comes back."""
    seen: set[Outcome] = set()
    for policy in ("recompute", "fail"):
        reader = Reader(place.open(), f"refused-{policy}", failure_policy=policy)
        reader.keeps_again(0)
        place.kill()
        try:
            loads = [reader.load([0]) for _ in range(3)]
            plan = reader.tiered.lookup(reader.space, [key(0)], SHAPE)
        finally:
            place.restart()
        assert plan.keys == () and plan.unasked == ("memory",), "no answer was taken for absence"
        assert all(load.failed == (policy == "fail") for load in loads)
        seen |= {outcome for load in loads for outcome in load.outcomes}
        assert any(counted(reader.tiered)["fetch", outcome.value] for outcome in seen)
        reader.keeps_again(1)
        reader.close()
    return seen


WRITER = """
import sys
from kvrelay.edge.stores.config import open_store
from tests.conformance.stores.service import Reader
writer = Reader(open_store(sys.argv[1], deadline_s=5.0), sys.argv[2])
number = int(sys.argv[3])
writer.keep(number)
while True:
    print(number, flush=True)
    number += 1
    writer.keep(number)
"""


def killed_mid_write(place: Place) -> set[Outcome]:
    """Another process writes chunks of several pieces and dies somewhere in it, a few times."""
    seen: set[Outcome] = set()
    for attempt in range(ROUNDS_OF_KILLS):
        tenant, first = "killed", 1000 * attempt
        command = [sys.executable, "-c", WRITER, place.url, tenant, str(first)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ)
        assert writer.stdout is not None
        assert writer.stdout.readline(), "the writer did not start"
        time.sleep(0.01 + 0.013 * attempt)
        writer.send_signal(signal.SIGKILL)
        told = [int(line) for line in writer.stdout.read().split() if line]
        writer.wait()
        writer.stdout.close()
        under_way = (told[-1] if told else first) + 1
        reader = Reader(place.open(), tenant)
        for number in range(first, under_way + 1):
            offered = reader.tiered.lookup(reader.space, [key(number)], SHAPE).keys
            outcome = reader.one(number)
            assert outcome is Outcome.HIT or not offered or place.url.startswith(IN_THE_WRITER), "offered, not there"
            seen.add(outcome)
        reader.keeps_again(under_way)
        reader.close()
    return seen


def full(place: Place) -> set[Outcome]:
    """Chunks are kept until there is no room: what was not kept is never offered, what was is right or gone."""
    reader = Reader(place.fill(), "full")
    outcomes = {number: reader.keep(number) for number in range(MOST_OBJECTS)}
    refusals = {number for number, outcome in outcomes.items() if outcome is not Outcome.STORED}
    found = {number: reader.one(number) for number in outcomes}
    assert all(found[number] is not Outcome.HIT for number in refusals), "offered, and not kept"
    assert refusals or any(outcome is not Outcome.HIT for outcome in found.values()), "it never was full"
    counts = counted(reader.tiered)
    for outcome in set(outcomes.values()):
        assert counts["store", outcome.value] >= sum(o is outcome for o in outcomes.values()), f"{outcome} not counted"
    place.empty()
    reader.keeps_again(MOST_OBJECTS)
    reader.close()
    return {outcomes[number] for number in refusals} or set(found.values())


_NO_ANSWER = frozenset({Outcome.TIMEOUT, Outcome.UNAVAILABLE})
_GONE = frozenset({Outcome.MISS, Outcome.PARTIAL, *_NO_ANSWER})
SERVICE_FAULTS: dict[Callable[[Place], set[Outcome]], frozenset[Outcome]] = {
    slow: frozenset({Outcome.HIT}),
    hung: _NO_ANSWER,
    refused: _NO_ANSWER,
    killed_mid_write: frozenset({Outcome.HIT, *_GONE}),
    full: frozenset({Outcome.NO_SPACE, *_GONE, Outcome.HIT}),
}


def run_service_faults(place: Place, impossible: Mapping[str, str]) -> dict[str, Counter[str]]:
    """Every fault that this place can have; returns outcomes by fault."""
    table: dict[str, Counter[str]] = {}
    for fault, allowed in SERVICE_FAULTS.items():
        if fault.__name__ in impossible:
            continue
        seen = fault(place)
        assert seen <= allowed, f"{fault.__name__} led to {seen - allowed}"
        table[fault.__name__] = Counter(outcome.value for outcome in seen)
    return table
