"""Who breaks things: worker processes die by signal in turn, or by a fault of their own, and come back.

It writes down every death and judges nothing.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator, Sequence
from itertools import cycle

import aiohttp
import msgspec

from kvrelay.edge.worker.launch import MockFleet, RunningWorker

POLL_S = 0.05
SEEDS_APART = 1000
OWN_DEATH_STATUS = 70  # a worker that `die_after_chunks` struck

# Five requests in a hundred. A death costs the other requests of its worker as well, so it is the rarest.
FAULTS: tuple[dict[str, object], ...] = (
    {"kind": "delay", "ms": 300.0, "probability": 0.02},
    {"kind": "429", "retry_after_s": 1, "probability": 0.01},
    {"kind": "503", "retry_after_s": 1, "probability": 0.008},
    {"kind": "500", "probability": 0.007},
    {"kind": "refuse", "probability": 0.0048},
    {"kind": "die_after_chunks", "chunks": 3, "probability": 0.0002},
)

# Nine in a hundred, of kinds that suspend workers or cut all their connections at once.
HARSH_FAULTS: tuple[dict[str, object], ...] = (
    {"kind": "garbage", "probability": 0.03},
    {"kind": "refuse", "probability": 0.03},
    {"kind": "500", "probability": 0.015},
    {"kind": "hang", "probability": 0.005},
    {"kind": "hang", "after_chunks": 3, "probability": 0.005},
    {"kind": "refuse", "listener_down_s": 0.3, "probability": 0.005},
)


class Death(msgspec.Struct):
    """One life of a worker that ended. `how`: killed (SIGKILL), terminated (SIGTERM, drains) or died (a fault)."""

    worker: str
    how: str
    at_s: float
    exit_status: int | None = None


class Nemesis:
    """Kills one worker every `every_s`, the `signals` in turn, and restarts the dead after `down_s`."""

    def __init__(
        self,
        fleet: MockFleet,
        *,
        every_s: float,
        down_s: float,
        signals: Sequence[signal.Signals] = (signal.SIGKILL, signal.SIGTERM),
    ) -> None:
        self._fleet = fleet
        self._signals = signals
        self._every_s = every_s
        self._down_s = down_s
        self._gone_at: dict[str, float] = {}
        self.deaths: dict[str, Death] = {}  # by incarnation
        self.restarts = 0

    async def spoil(self) -> None:
        """Switch the faults on; workers that are restarted have those of their spec."""
        await self._switch_faults(FAULTS)

    async def run(self, seconds: float) -> None:
        """Until the time is over; then everybody is brought back."""
        began_s = time.monotonic()
        next_blow_s = began_s + self._every_s
        victims = cycle(range(len(self._fleet.workers)))
        signals = cycle(self._signals)
        while time.monotonic() < began_s + seconds:
            await asyncio.sleep(POLL_S)
            if time.monotonic() >= next_blow_s:
                next_blow_s += self._every_s
                self._strike(victims, next(signals))
            await self._bring_back(self._down_s)
        await self.heal()

    async def heal(self) -> None:
        """All workers live again, and none has a fault. A process that drains is waited for."""
        while any(worker.incarnation in self.deaths for worker in self._fleet.workers):
            await self._bring_back(0.0)
            await asyncio.sleep(POLL_S)
        await self._switch_faults(())

    async def _switch_faults(self, faults: Sequence[dict[str, object]]) -> None:
        async with aiohttp.ClientSession() as session:
            for worker in self._fleet.workers:
                url = f"{worker.url}/mock/faults"
                async with session.delete(url):
                    pass
                for fault in faults:
                    async with session.post(url, json=fault):
                        pass

    def _strike(self, victims: Iterator[int], number: signal.Signals) -> None:
        """The next worker that is well; a fleet without one is left alone."""
        for _ in self._fleet.workers:
            worker = self._fleet.workers[next(victims)]
            if worker.alive and worker.incarnation not in self.deaths:
                how = "killed" if number is signal.SIGKILL else "terminated"
                self.deaths[worker.incarnation] = Death(worker.name, how, time.monotonic())
                worker.signal(number)
                return

    async def _bring_back(self, down_s: float) -> None:
        for worker in tuple(self._fleet.workers):
            if worker.alive:
                continue
            gone_at_s = self._note_gone(worker)
            if time.monotonic() >= gone_at_s + down_s:
                # another chance than in the last life, which would end at the same request again
                worker.spec = msgspec.structs.replace(worker.spec, seed=worker.spec.seed + SEEDS_APART)
                await asyncio.to_thread(self._fleet.restart, worker.name)
                self.restarts += 1

    def _note_gone(self, worker: RunningWorker) -> float:
        death = self.deaths.setdefault(worker.incarnation, Death(worker.name, "died", time.monotonic()))
        death.exit_status = worker.process.returncode
        return self._gone_at.setdefault(worker.incarnation, time.monotonic())
