"""Processes of a bench run: started, pinned to a core, asked for their CPU time, ended."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

START_TIMEOUT_S = 60.0  # a busy machine, several processes
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Pinned:
    """A child process on one core; `ready` is the first JSON line that it printed."""

    def __init__(self, process: subprocess.Popen[bytes], ready: Any) -> None:
        self.process = process
        self.ready = ready

    def cpu_s(self) -> float:
        """User and system time so far, all threads."""
        return _cpu_s(_stat(self.process.pid))

    def family_cpu_s(self) -> dict[int, float]:
        """The same of the process and of each of its living children, by process id."""
        stats = {int(name): _stat(int(name)) for name in os.listdir("/proc") if name.isdigit()}
        mine = self.process.pid
        return {pid: _cpu_s(stat) for pid, stat in stats.items() if stat and mine in (pid, int(stat[1]))}

    def rss_mb(self) -> float:
        with open(f"/proc/{self.process.pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _stat(pid: int) -> list[bytes]:
    """Fields from the third on, of a process that may be gone by now: then there are none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def _cpu_s(stat: Sequence[bytes]) -> float:
    return (int(stat[11]) + int(stat[12])) / TICKS_PER_S


@contextmanager
def pinned(
    arguments: Sequence[str], *, core: int | None, environment: Mapping[str, str] | None = None
) -> Iterator[Pinned]:
    """Runs `python ARGUMENTS` on that core, or on all of them, until the block ends."""
    with _running(arguments, core, environment) as process:
        yield Pinned(process, _ready_line(process))


@contextmanager
def launched(arguments: Sequence[str], *, core: int, is_ready: Callable[[], bool]) -> Iterator[Pinned]:
    """The same for a program that does not say by itself when it is ready."""
    with _running(arguments, core) as process:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_ready():
            if time.monotonic() > deadline or process.poll() is not None:
                raise TimeoutError(f"`{' '.join(arguments[:3])}` does not answer")
            time.sleep(0.1)
        yield Pinned(process, None)


@contextmanager
def _running(
    arguments: Sequence[str], core: int | None, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=None if environment is None else {**os.environ, **environment},
    )
    if core is not None:
        os.sched_setaffinity(process.pid, {core})
    try:
        yield process
    finally:
        assert process.stdin is not None and process.stdout is not None
        process.terminate()
        process.wait(timeout=START_TIMEOUT_S)
        process.stdin.close()
        process.stdout.close()


def cores() -> tuple[int, int]:
    """The gateway's core and everybody else's; the same one on a machine that has only one."""
    available = sorted(os.sched_getaffinity(0))
    return available[-1], available[0]


def _ready_line(process: subprocess.Popen[bytes]) -> Any:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
    if not readable:
        raise TimeoutError(f"process {process.pid} did not say that it is ready")
    return json.loads(process.stdout.readline())
