"""What a tier host needs of the world around it: the time, an alarm, and hands for its jobs.

In a process of its own these are the system's clocks, a thread that watches them, and a few threads per tier
(`Threads`). A simulation brings its own (`lab/sim/store.py`), and everything else of a host is the same there.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from kvrelay.core.tiers.effects import Check, Fetch, Ping, Probe, Remove, Transfer, Write
from kvrelay.edge.stores.store import Store

log = logging.getLogger("kvrelay.store")

Job = Probe | Fetch | Write | Check | Remove | Transfer | Ping


class Alarm(Protocol):
    def set(self, at_s: float) -> None:
        """Ring then; also at what was set before: ringing early is harmless, late is not."""
        ...

    def stop(self) -> None:
        """It does not ring after this."""
        ...


class Crew(Protocol):
    """Hands for the work on one store."""

    def submit(self, work: Callable[[], object], job: Job | None = None) -> None:
        """Do it when there is a hand free; `job` says what it is, None: no matter of the machine. Raises RuntimeError
        after `close`."""
        ...

    def go_on(self, work: Callable[[], object], job: Job) -> None:
        """Likewise, called by work as the last thing that it does: the hand that did it is free now."""
        ...

    def close(self) -> None:
        """Returns when running work has ended; what waits is not done."""
        ...


class Runtime(Protocol):
    def now_s(self) -> float:
        """Monotonic."""
        ...

    def wall_s(self) -> float:
        """Unix time."""
        ...

    def alarm(self, ring: Callable[[], None]) -> Alarm: ...

    def crew(self, name: str, store: Store, hands: int) -> Crew: ...


class Threads:
    """This process, with the system's clocks."""

    def now_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()

    def alarm(self, ring: Callable[[], None]) -> Alarm:
        return _ThreadAlarm(ring)

    def crew(self, name: str, store: Store, hands: int) -> Crew:
        return _ThreadCrew(name, hands)


class _ThreadCrew:
    def __init__(self, name: str, hands: int) -> None:
        self._pool = ThreadPoolExecutor(hands, thread_name_prefix=f"kvrelay-{name}")
        self._closed = False
        self._hand = _Hand()

    def submit(self, work: Callable[[], object], job: Job | None = None) -> None:
        self._pool.submit(self._do, work)

    def go_on(self, work: Callable[[], object], job: Job) -> None:
        """On the same thread: waking another one takes longer than many a fetch."""
        if not self._hand.working:
            self.submit(work, job)
        elif not self._closed:
            self._hand.next = work

    def close(self) -> None:
        self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _do(self, work: Callable[[], object] | None) -> None:
        hand = self._hand
        hand.working = True
        while work is not None:
            hand.next = None
            _guarded(work)
            work = hand.next
        hand.working = False


class _Hand(threading.local):
    """One thread of a crew."""

    working = False
    next: Callable[[], object] | None = None


def _guarded(work: Callable[[], object]) -> None:
    """Nobody waits for a thread's work: what is raised there would be lost."""
    try:
        work()
    except Exception:
        log.exception("a store job ended in a way that nobody foresaw")


class _ThreadAlarm:
    """Calls `ring` on a thread of its own when the time last set has come."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._times: list[float] = []
        self._stopped = False
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvrelay-store-alarm", daemon=True)
        self._thread.start()

    def set(self, at_s: float) -> None:
        with self._condition:
            heapq.heappush(self._times, at_s)
            self._condition.notify()

    def stop(self) -> None:
        with self._condition:
            self._stopped = True
            self._condition.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while self._wait():
            self._ring()

    def _wait(self) -> bool:
        """True when it is time to ring."""
        with self._condition:
            while not self._stopped:
                now_s = time.monotonic()
                if self._times and self._times[0] <= now_s:
                    while self._times and self._times[0] <= now_s:
                        heapq.heappop(self._times)
                    return True
                self._condition.wait(self._times[0] - now_s if self._times else None)
        return False
