"""Start and stop mock workers, each its own OS process: for the command line, the demo, drills and tests.

    with MockFleet([MockSpec(name="a"), MockSpec(name="b")]) as fleet:      # or `async with`
        fleet.workers[0].url
        fleet.kill("a")

A child reads its spec from its standard input and then watches that pipe: when this process dies, however it dies, the
pipe closes and the child ends. Nothing here is killed by name, only by the PIDs that were started.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Self

import msgspec

from kvrelay.edge.worker.spec import MockReady, MockSpec

READY_TIMEOUT_S = 30.0
STOP_SLACK_S = 3.0


class WorkerStartError(Exception):
    """A worker process ended or stayed silent instead of saying that it is ready."""


class RunningWorker:
    """One life of one mock worker. `spec` has the real ports, so that a restart keeps the addresses."""

    def __init__(self, spec: MockSpec, ready: MockReady, process: subprocess.Popen[bytes]) -> None:
        self.spec = spec
        self.ready = ready
        self.process = process

    @property
    def name(self) -> str:
        return self.ready.name

    @property
    def url(self) -> str:
        return self.ready.url

    @property
    def events(self) -> str | None:
        return self.ready.events

    @property
    def replay(self) -> str | None:
        return self.ready.replay

    @property
    def topic(self) -> str | None:
        return self.ready.topic

    @property
    def pid(self) -> int:
        return self.ready.pid

    @property
    def incarnation(self) -> str:
        return self.ready.incarnation

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        """Ignored when the process is already gone."""
        if self.alive:
            self.process.send_signal(number)

    def wait(self, timeout_s: float) -> int | None:
        """The exit status, or None when the process is still there."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """Close our ends of the pipes of an ended process."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def start_workers(specs: Iterable[MockSpec], *, timeout_s: float = READY_TIMEOUT_S) -> list[RunningWorker]:
    """Start all in parallel and wait until each is ready. If one fails, none is left running."""
    deadline = time.monotonic() + timeout_s
    started: list[tuple[MockSpec, subprocess.Popen[bytes]]] = []
    try:
        for spec in specs:
            started.append((spec, _spawn(spec)))
        return [_await_ready(spec, process, deadline) for spec, process in started]
    except BaseException:
        for _, process in started:
            process.kill()
            process.communicate()
        raise


def stop_workers(workers: Iterable[RunningWorker]) -> None:
    """Drain all at once, then kill what does not end in its own time."""
    workers = list(workers)
    for worker in workers:
        worker.signal(signal.SIGTERM)
    deadline = time.monotonic() + STOP_SLACK_S + max((worker.spec.drain_s for worker in workers), default=0.0)
    for worker in workers:
        if worker.wait(max(0.0, deadline - time.monotonic())) is None:
            worker.process.kill()
            worker.process.wait()
        worker.close()


class MockFleet:
    """Several workers under one owner. Leaving the block stops them all."""

    def __init__(self, specs: Iterable[MockSpec], *, ready_timeout_s: float = READY_TIMEOUT_S) -> None:
        self._specs = list(specs)
        self._ready_timeout_s = ready_timeout_s
        self.workers: list[RunningWorker] = []

    def start(self) -> None:
        self.workers = start_workers(self._specs, timeout_s=self._ready_timeout_s)

    def stop(self) -> None:
        stop_workers(self.workers)

    def worker(self, name: str) -> RunningWorker:
        """The current life of that worker."""
        return next(worker for worker in self.workers if worker.name == name)

    def kill(self, name: str) -> None:
        """SIGKILL, as a crash would do it."""
        worker = self.worker(name)
        worker.signal(signal.SIGKILL)
        worker.process.wait()

    def terminate(self, name: str) -> int | None:
        """SIGTERM and wait for the drain; the exit status, None if it had to be killed."""
        worker = self.worker(name)
        worker.signal(signal.SIGTERM)
        status = worker.wait(worker.spec.drain_s + STOP_SLACK_S)
        if status is None:
            self.kill(name)
        return status

    def restart(self, name: str) -> RunningWorker:
        """A new life on the same addresses; a process that still runs is killed first."""
        old = self.worker(name)
        self.kill(name)
        old.close()
        (new,) = start_workers([old.spec], timeout_s=self._ready_timeout_s)
        self.workers[self.workers.index(old)] = new
        return new

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)


def _spawn(spec: MockSpec) -> subprocess.Popen[bytes]:
    """In a session of its own: a terminal's Ctrl-C is for us, and our SIGTERM would be the worker's second signal."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvrelay.edge.worker.process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    try:
        process.stdin.write(msgspec.json.encode(spec) + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass  # it ended already; waiting for its ready line says so
    return process


def _await_ready(spec: MockSpec, process: subprocess.Popen[bytes], deadline: float) -> RunningWorker:
    line = _read_line(process, deadline)
    if not line.endswith(b"\n"):
        status = process.poll()
        what = "stayed silent" if status is None else f"ended with status {status}"
        raise WorkerStartError(f"worker `{spec.name}` (pid {process.pid}) {what} before it was ready")
    ready = msgspec.json.decode(line, type=MockReady)
    return RunningWorker(_with_real_addresses(spec, ready), ready, process)


def _read_line(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    """Up to a line break, the end of the stream or the deadline, whichever comes first."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    line = b""
    while not line.endswith(b"\n"):
        readable, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        data = os.read(descriptor, 4096) if readable else b""
        if not data:
            if readable:  # the stream ended, so the process is ending: its status is worth a short wait
                _wait_briefly(process)
            break
        line += data
    return line


def _wait_briefly(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        pass


def _with_real_addresses(spec: MockSpec, ready: MockReady) -> MockSpec:
    port = int(ready.url.rpartition(":")[2])
    events = spec.events if ready.events is None else ready.events
    replay = spec.replay if ready.replay is None else ready.replay
    return msgspec.structs.replace(spec, port=port, events=events, replay=replay)
