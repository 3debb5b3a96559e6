"""Watches running workers until told to stop: reports the ones that end, starts them again if asked to."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

from kvrelay.edge.worker.launch import MockFleet, RunningWorker, WorkerStartError

RESTART_PAUSE_S = 0.5


class Supervisor:
    """Owns the signals of its process while `run` is under way. The callbacks only report."""

    def __init__(
        self,
        fleet: MockFleet,
        *,
        restart: bool,
        on_ended: Callable[[RunningWorker, int], None],
        on_restarted: Callable[[RunningWorker], None],
        on_restart_failed: Callable[[RunningWorker, WorkerStartError], None],
    ) -> None:
        self._fleet = fleet
        self._restart = restart
        self._on_ended = on_ended
        self._on_restarted = on_restarted
        self._on_restart_failed = on_restart_failed
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._alive = 0

    async def run(self) -> bool:
        """Until a signal comes, then drain and stop all. False: every worker had ended before."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        for worker in self._fleet.workers:
            self._watch(worker)
        await self._stop.wait()
        asked = self._alive > 0
        for task in self._tasks:
            task.cancel()
        await asyncio.to_thread(self._fleet.stop)
        return asked

    def _on_signal(self) -> None:
        """The second signal is for somebody who does not want to wait for the drain."""
        if self._stop.is_set():
            for worker in self._fleet.workers:
                worker.signal(signal.SIGKILL)
        self._stop.set()

    def _watch(self, worker: RunningWorker) -> None:
        self._alive += 1
        descriptor = os.pidfd_open(worker.pid)
        asyncio.get_running_loop().add_reader(descriptor, self._on_end, worker, descriptor)

    def _on_end(self, worker: RunningWorker, descriptor: int) -> None:
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        self._alive -= 1
        status = worker.process.wait()
        if self._stop.is_set():
            return
        self._on_ended(worker, status)
        if self._restart:
            task = asyncio.get_running_loop().create_task(self._start_again(worker))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif self._alive == 0:
            self._stop.set()

    async def _start_again(self, worker: RunningWorker) -> None:
        while True:
            await asyncio.sleep(RESTART_PAUSE_S)
            try:
                new = await asyncio.to_thread(self._fleet.restart, worker.name)
            except WorkerStartError as error:
                self._on_restart_failed(worker, error)
                continue
            self._on_restarted(new)
            self._watch(new)
            return
