"""Processes of a bench run: started, pinned to a core, asked for their CPU time, ended."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

START_TIMEOUT_S = 20.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Pinned:
    """A child process on one core; `ready` is the first JSON line that it printed."""

    def __init__(self, process: subprocess.Popen[bytes], ready: Any) -> None:
        self.process = process
        self.ready = ready

    def cpu_s(self) -> float:
        """User and system time so far, all threads."""
        with open(f"/proc/{self.process.pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    def rss_mb(self) -> float:
        with open(f"/proc/{self.process.pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextmanager
def pinned(arguments: Sequence[str], *, core: int) -> Iterator[Pinned]:
    """Runs `python ARGUMENTS` on that core until the block ends."""
    with _running(arguments, core) as process:
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
def _running(arguments: Sequence[str], core: int) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
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
