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
        self._asked = False  # to stop, by a signal
        self._tasks: set[asyncio.Task[None]] = set()
        self._watched: dict[int, RunningWorker] = {}  # living ones, by the descriptor that tells of their end

    async def run(self) -> bool:
        """Until a signal comes, then drain and stop all. False: every worker had ended before."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        for worker in self._fleet.workers:
            self._watch(worker)
        await self._stop.wait()
        self._stop_watching()
        for task in self._tasks:
            task.cancel()
        await asyncio.to_thread(self._fleet.stop)
        return self._asked

    def _on_signal(self) -> None:
        """The second signal is for somebody who does not want to wait for the drain."""
        if self._asked:
            for worker in self._fleet.workers:
                worker.signal(signal.SIGKILL)
        self._asked = True
        self._stop.set()

    def _watch(self, worker: RunningWorker) -> None:
        descriptor = os.pidfd_open(worker.pid)
        self._watched[descriptor] = worker
        asyncio.get_running_loop().add_reader(descriptor, self._on_end, worker, descriptor)

    def _stop_watching(self) -> None:
        """Of a worker that ended just before we were told to stop, its end is news; of the others it is our doing."""
        for descriptor, worker in tuple(self._watched.items()):
            asyncio.get_running_loop().remove_reader(descriptor)
            if not worker.alive:
                self._buried(worker, descriptor)
            else:
                os.close(descriptor)

    def _buried(self, worker: RunningWorker, descriptor: int) -> None:
        del self._watched[descriptor]
        os.close(descriptor)
        self._on_ended(worker, worker.process.wait())

    def _on_end(self, worker: RunningWorker, descriptor: int) -> None:
        asyncio.get_running_loop().remove_reader(descriptor)
        self._buried(worker, descriptor)
        if self._restart:
            task = asyncio.get_running_loop().create_task(self._start_again(worker))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif not self._watched:
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
