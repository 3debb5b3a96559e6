"""Runs the tier machine on threads: effects become calls on stores, their ends become events.

A tier in this host's memory cannot hang, so whoever steps the machine runs its jobs on the spot, without a change of
thread. Every other tier has a few threads of its own. One more thread watches the time. The machine is stepped under
one lock, and effects are acted upon outside it, except for copies between destinations: those are part of the step,
because the next one may end the load that they read from or write to.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from msgspec import Struct

from kvrelay.core.tiers.effects import (
    Announce,
    Check,
    Copy,
    Fetch,
    LoadFinished,
    LookupAnswered,
    Ping,
    Probe,
    RemovalFinished,
    Remove,
    SaveFinished,
    TierEffect,
    TierStateChanged,
    Transfer,
    WakeAt,
    Write,
)
from kvrelay.core.tiers.events import (
    Checked,
    Fetched,
    Pinged,
    Probed,
    Removed,
    TierEvent,
    Transferred,
    Woke,
    Written,
)
from kvrelay.core.tiers.machine import TierMachine
from kvrelay.core.tiers.outcome import Outcome
from kvrelay.edge.stores.buffers import Lease
from kvrelay.edge.stores.codecs import copy
from kvrelay.edge.stores.reading import Reader, Wanted
from kvrelay.edge.stores.store import NoSpace, Store, StoreError, StoreTimeout, WriteOutcome, total_bytes
from kvrelay.edge.stores.writing import Writing

log = logging.getLogger("kvrelay.store")

_Job = Probe | Fetch | Write | Check | Remove | Transfer | Ping
_LEAST_DEADLINE_S = 0.001


class HostTier(Struct, frozen=True):
    """A tier's store; `inline`: its calls return at memory speed, so that no thread is worth it."""

    name: str
    store: Store
    reader: Reader
    inline: bool
    ttl_s: float | None
    threads: int


class Destinations(Struct, frozen=True):
    """Where a load's chunks go and what each has to be."""

    lease: Lease
    wanted: tuple[Wanted, ...]


class TierHost:
    def __init__(
        self,
        machine: TierMachine,
        tiers: Sequence[HostTier],
        *,
        announce: Callable[[str, bytes, int], None] | None = None,
        observe: Callable[[str, str, Outcome, float], None] | None = None,
    ) -> None:
        self.machine = machine
        self._tiers = tiers
        self._announce, self._observe = announce, observe
        self._lock = threading.Lock()
        self._serial = 0
        self._waiting: dict[tuple[str, int], Future[TierEffect]] = {}
        self._destinations: dict[int, Destinations] = {}
        self._writing: dict[int, Writing] = {}
        self._pools = [
            None if tier.inline else ThreadPoolExecutor(tier.threads, thread_name_prefix=f"kvrelay-{tier.name}")
            for tier in tiers
        ]
        self._clock = _Alarm(lambda: self.post(Woke()))

    def ask(
        self, kind: str, make_event: Callable[[int], TierEvent], *, carry: Destinations | Writing | None = None
    ) -> Future[TierEffect]:
        """Post an event that some effect will answer; the future has that effect. `make_event` gets the number by which
        the answer is told apart; `carry` is what the jobs on the way need."""
        future: Future[TierEffect] = Future()
        with self._lock:
            self._serial += 1
            number = self._serial
        self._waiting[kind, number] = future
        if isinstance(carry, Destinations):
            self._destinations[number] = carry
        elif carry is not None:
            self._writing[number] = carry
        self.post(make_event(number))
        return future

    def post(self, event: TierEvent) -> None:
        """Step the machine and act, also upon what jobs on the spot bring about."""
        effects = deque(self._step(event))
        while effects:
            effects.extend(self._act(effects.popleft()))

    def aside(self, work: Callable[[Store], object]) -> None:
        """Something that is no matter of the machine, on a thread of every tier that others see."""
        for tier, pool in zip(self._tiers, self._pools, strict=True):
            if not tier.store.shared:
                continue
            if pool is None:
                _quietly(work, tier.store)
            else:
                pool.submit(_quietly, work, tier.store)

    def inspect(self, look: Callable[[TierMachine], object]) -> object:
        """A consistent view of the machine."""
        with self._lock:
            return look(self.machine)

    def close(self) -> None:
        """Let running jobs end; what waits is abandoned."""
        self._clock.stop()
        for pool in self._pools:
            if pool is not None:
                pool.shutdown(wait=True, cancel_futures=True)
        for tier in self._tiers:
            tier.store.close()

    def _step(self, event: TierEvent) -> tuple[TierEffect, ...]:
        with self._lock:
            effects = self.machine.step(time.monotonic(), event)
            for effect in effects:
                if isinstance(effect, Copy):
                    self._copy(effect)
        return effects

    def _copy(self, effect: Copy) -> None:
        source, target = self._destinations[effect.source_load], self._destinations[effect.load]
        with source.lease.writing(effect.source_position) as here, target.lease.writing(effect.position) as there:
            assert here is not None and there is not None, "a copy between loads of which one is over"
            copy(here, there)

    def _act(self, effect: TierEffect) -> tuple[TierEffect, ...]:
        match effect:
            case Probe() | Fetch() | Write() | Check() | Remove() | Ping() | Transfer():
                return self._start(effect)
            case LookupAnswered():
                self._answer("lookup", effect.lookup, effect)
            case LoadFinished():
                self._destinations.pop(effect.load).lease.revoke()
                self._answer("load", effect.load, effect)
            case SaveFinished():
                del self._writing[effect.save]
                self._answer("save", effect.save, effect)
            case RemovalFinished():
                self._answer("removal", effect.removal, effect)
            case WakeAt():
                self._clock.set(effect.at_s)
            case Announce() if self._announce is not None:
                self._announce(self._tiers[effect.tier].name, effect.key, effect.stored_bytes)
            case TierStateChanged():
                state = "in use again" if effect.in_use else "out of use: it does not answer"
                log.warning("store tier %s is %s", self._tiers[effect.tier].name, state)
        return ()

    def _answer(self, kind: str, number: int, effect: TierEffect) -> None:
        future = self._waiting.pop((kind, number))
        if not future.cancelled():
            future.set_result(effect)

    # --- jobs --------------------------------------------------------------------------------------------------------

    def _start(self, job: _Job) -> tuple[TierEffect, ...]:
        index = job.source if isinstance(job, Transfer) else job.tier
        pool = self._pools[index]
        if isinstance(job, Transfer) and pool is None:
            pool = self._pools[job.target]
        if pool is None:
            return self._run(job)
        try:
            pool.submit(self._run_and_post, job)
        except RuntimeError:  # closing
            return self._step(_failed(job, Outcome.UNAVAILABLE))
        return ()

    def _run_and_post(self, job: _Job) -> None:
        try:
            effects = deque(self._run(job))
            while effects:
                effects.extend(self._act(effects.popleft()))
        except Exception:
            log.exception("a store job ended in a way that nobody foresaw")

    def _run(self, job: _Job) -> tuple[TierEffect, ...]:
        """Do it, tell the machine, and return what it wants next."""
        began_s = time.monotonic()
        try:
            if isinstance(job, Fetch):
                return self._fetch(job, began_s)
            event = self._call(job)
        except NoSpace:
            event = _failed(job, Outcome.NO_SPACE)
        except StoreTimeout:
            event = _failed(job, Outcome.TIMEOUT)
        except StoreError as error:
            log.debug("%s: %s", type(job).__name__, error)
            event = _failed(job, Outcome.UNAVAILABLE)
        self._measure(job, began_s, event)
        return self._step(event)

    def _fetch(self, job: Fetch, began_s: float) -> tuple[TierEffect, ...]:
        """The lease is held until the machine has heard: a follower is given a copy from a destination that is ours."""
        reader = self._tiers[job.tier].reader
        deadline_s = max(_LEAST_DEADLINE_S, job.deadline_s - began_s)
        if job.load is None:
            outcome, moved = reader.measure(job.key, deadline_s=deadline_s)
            return self._fetched(job, began_s, outcome, moved)
        destinations = self._destinations.get(job.load)
        if destinations is None:
            return self._fetched(job, began_s, Outcome.SKIPPED, 0)
        wanted = destinations.wanted[job.position]
        with reader.fetch(wanted, destinations.lease, job.position, deadline_s=deadline_s, keep=job.keep) as (
            outcome,
            moved,
        ):
            return self._fetched(job, began_s, outcome, moved)

    def _fetched(self, job: Fetch, began_s: float, outcome: Outcome, moved: int) -> tuple[TierEffect, ...]:
        event = Fetched(job.job, outcome, moved)
        self._measure(job, began_s, event)
        return self._step(event)

    def _call(self, job: Probe | Write | Check | Remove | Transfer | Ping) -> TierEvent:
        left_s = max(_LEAST_DEADLINE_S, job.deadline_s - time.monotonic())
        tier = self._tiers[job.source if isinstance(job, Transfer) else job.tier]
        match job:
            case Probe():
                return Probed(job.job, tuple(tier.store.contains(job.keys, deadline_s=left_s)))
            case Write():
                writing = self._writing[job.save]
                parts = writing.parts(job.tier, job.piece)
                key = writing.key(job.piece)
                done = tier.store.write(key, parts, only_if_absent=True, deadline_s=left_s, ttl_s=tier.ttl_s)
                writing.written(job.tier, total_bytes(parts) if done is WriteOutcome.WRITTEN else None)
                return Written(job.job, Outcome.STORED, existed=done is WriteOutcome.EXISTS)
            case Check():
                writing = self._writing[job.save]
                (kept,) = tier.store.sizes([writing.key(job.piece)], deadline_s=left_s)
                return Checked(job.job, writing.judge(job.tier, kept))
            case Remove():
                return Removed(job.job, tier.reader.delete_all(job.keys, deadline_s=left_s))
            case Transfer():
                to = self._tiers[job.target]
                outcome, moved = tier.reader.transfer(job.key, to.store, ttl_s=to.ttl_s, deadline_s=left_s)
                return Transferred(job.job, outcome, moved)
            case Ping():
                tier.store.ping(deadline_s=left_s)
                return Pinged(job.job, True)

    def _measure(self, job: _Job, began_s: float, event: TierEvent) -> None:
        if self._observe is not None and not isinstance(job, Ping | Transfer):
            outcome = getattr(event, "outcome", Outcome.HIT)
            self._observe(self._tiers[job.tier].name, _OPS[type(job)], outcome, time.monotonic() - began_s)


_OPS = {Probe: "lookup", Fetch: "fetch", Write: "store", Check: "verify", Remove: "delete"}


def _failed(job: _Job, outcome: Outcome) -> TierEvent:
    match job:
        case Probe():
            return Probed(job.job, None, outcome)
        case Fetch():
            return Fetched(job.job, outcome)
        case Write():
            return Written(job.job, outcome)
        case Check():
            return Checked(job.job, outcome)
        case Remove():
            return Removed(job.job, 0, outcome)
        case Transfer():
            return Transferred(job.job, outcome)
        case Ping():
            return Pinged(job.job, False)


def _quietly(work: Callable[[Store], object], store: Store) -> None:
    try:
        work(store)
    except StoreError as error:
        log.info("a store did not take what was left there: %s", error)


class _Alarm:
    """Calls `ring` on a thread of its own when the time last set has come."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._times: list[float] = []
        self._stopped = False
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvrelay-store-alarm", daemon=True)
        self._thread.start()

    def set(self, at_s: float) -> None:
        """Ring then; also at what was set before: ringing early is harmless, late is not."""
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
