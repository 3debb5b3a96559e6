"""Runs the tier machine: effects become calls on stores, their ends become events.

A tier in this host's memory cannot hang, so whoever steps the machine runs its jobs on the spot, without a change of
thread. Every other tier has a crew of its own, and an alarm watches the time; both come from the `Runtime`, which is
threads in a live process and virtual time in a simulation. The machine is stepped under one lock, and effects are acted
upon outside it, except for copies between destinations: those are part of the step, because the next one may end the
load that they read from or write to.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

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
from kvrelay.edge.stores.runtime import Crew, Job, Runtime
from kvrelay.edge.stores.store import (
    NoSpace,
    Store,
    StoreError,
    StoreTimeout,
    StoreUnavailable,
    WriteOutcome,
    total_bytes,
)
from kvrelay.edge.stores.writing import Writing

log = logging.getLogger("kvrelay.store")

_LEAST_DEADLINE_S = 0.001
_CLOSED = "the store was closed"


class HostTier(Struct, frozen=True):
    """A tier's store; `inline`: its calls return at memory speed, so that no thread is worth it."""

    name: str
    store: Store
    reader: Reader
    inline: bool
    ttl_s: float | None
    hands: int


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
        runtime: Runtime,
        announce: Callable[[str, bytes, int], None] | None = None,
        observe: Callable[[str, str, Outcome, float], None] | None = None,
        state_changed: Callable[[str, bool], None] | None = None,
    ) -> None:
        self.machine = machine
        self._tiers = tiers
        self._runtime = runtime
        self._announce, self._observe, self._state_changed = announce, observe, state_changed or _say
        self._lock = threading.Lock()
        self._serial = 0
        self._closed = False
        self._waiting: dict[tuple[str, int], Future[TierEffect]] = {}
        self._destinations: dict[int, Destinations] = {}
        self._writing: dict[int, Writing] = {}
        self._crews: list[Crew | None] = [
            None if tier.inline else runtime.crew(tier.name, tier.store, tier.hands) for tier in tiers
        ]
        self._alarm = runtime.alarm(lambda: self.post(Woke()))

    def ask(
        self, kind: str, make_event: Callable[[int], TierEvent], *, carry: Destinations | Writing | None = None
    ) -> Future[TierEffect]:
        """Post an event that some effect will answer; the future has that effect. `make_event` gets the number by which
        the answer is told apart; `carry` is what the jobs on the way need."""
        future: Future[TierEffect] = Future()
        with self._lock:
            if self._closed:
                raise StoreUnavailable(_CLOSED)
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
        """Something that is no matter of the machine, by the crew of every tier that others see."""
        for index, tier in enumerate(self._tiers):
            if tier.store.shared:
                self.by_crew(index, work)

    def by_crew(self, index: int, work: Callable[[Store], object]) -> None:
        """Likewise, for one tier."""
        tier, crew = self._tiers[index], self._crews[index]
        if crew is None:
            _quietly(work, tier.store)
        else:
            crew.submit(partial(_quietly, work, tier.store))

    def inspect(self, look: Callable[[TierMachine], object]) -> object:
        """A consistent view of the machine."""
        with self._lock:
            return look(self.machine)

    @property
    def under_way(self) -> int:
        """Questions that have no answer yet."""
        return len(self._waiting)

    def close(self) -> None:
        """Let running jobs end; what waits is abandoned, and nobody waits for it any more."""
        with self._lock:
            self._closed = True
        self._alarm.stop()
        for crew in self._crews:
            if crew is not None:
                crew.close()
        with self._lock:
            abandoned, self._waiting = self._waiting, {}
        for future in abandoned.values():
            if not future.done():
                future.set_exception(StoreUnavailable(_CLOSED))
        for tier in self._tiers:
            tier.store.close()

    def _step(self, event: TierEvent) -> tuple[TierEffect, ...]:
        with self._lock:
            effects = self.machine.step(self._runtime.now_s(), event)
            for effect in effects:
                if isinstance(effect, Copy):
                    self._copy(effect)
        return effects

    def _copy(self, effect: Copy) -> None:
        source, target = self._destinations[effect.source_load], self._destinations[effect.load]
        with source.lease.writer(effect.source_position) as reads, target.lease.writer(effect.position) as writes:
            here, there = reads.enter(), writes.enter()
            assert here is not None and there is not None, "a copy between loads of which one is over"
            copy(here, there)

    def _act(self, effect: TierEffect, *, last: bool = False) -> tuple[TierEffect, ...]:
        """`last`: a hand of a crew acts, and has nothing else to do after this."""
        match effect:
            case Probe() | Fetch() | Write() | Check() | Remove() | Ping() | Transfer():
                return self._start(effect, last=last)
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
                self._alarm.set(effect.at_s)
            case Announce() if self._announce is not None:
                self._announce(self._tiers[effect.tier].name, effect.key, effect.stored_bytes)
            case TierStateChanged():
                self._state_changed(self._tiers[effect.tier].name, effect.in_use)
        return ()

    def _answer(self, kind: str, number: int, effect: TierEffect) -> None:
        future = self._waiting.pop((kind, number), None)
        if future is not None and not future.cancelled():  # none: it was abandoned when this was closed
            future.set_result(effect)

    # --- jobs --------------------------------------------------------------------------------------------------------

    def _start(self, job: Job, *, last: bool) -> tuple[TierEffect, ...]:
        crew = self._crew_of(job)
        if crew is None:
            return self._run(job)
        hand_over = crew.go_on if last else crew.submit
        try:
            hand_over(partial(self._run_and_act, job), job)
        except RuntimeError:  # closing
            return self._step(_failed(job, Outcome.UNAVAILABLE))
        return ()

    def _crew_of(self, job: Job) -> Crew | None:
        if not isinstance(job, Transfer):
            return self._crews[job.tier]
        return self._crews[job.source] or self._crews[job.target]

    def _run_and_act(self, job: Job) -> None:
        effects = deque(self._run(job))
        while effects:
            effect = effects.popleft()
            effects.extend(self._act(effect, last=not effects))

    def _run(self, job: Job) -> tuple[TierEffect, ...]:
        """Do it, tell the machine, and return what it wants next."""
        began_s = self._runtime.now_s()
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
        with destinations.lease.writer(job.position) as writer:
            outcome, moved = reader.fetch(wanted, writer, deadline_s=deadline_s, keep=job.keep)
            return self._fetched(job, began_s, outcome, moved)

    def _fetched(self, job: Fetch, began_s: float, outcome: Outcome, moved: int) -> tuple[TierEffect, ...]:
        event = Fetched(job.job, outcome, moved)
        self._measure(job, began_s, event)
        return self._step(event)

    def _call(self, job: Probe | Write | Check | Remove | Transfer | Ping) -> TierEvent:
        left_s = max(_LEAST_DEADLINE_S, job.deadline_s - self._runtime.now_s())
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

    def _measure(self, job: Job, began_s: float, event: TierEvent) -> None:
        if self._observe is not None and not isinstance(job, Ping | Transfer):
            outcome = getattr(event, "outcome", Outcome.HIT)
            self._observe(self._tiers[job.tier].name, _OPS[type(job)], outcome, self._runtime.now_s() - began_s)


_OPS = {Probe: "lookup", Fetch: "fetch", Write: "store", Check: "verify", Remove: "delete"}


def _failed(job: Job, outcome: Outcome) -> TierEvent:
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


def _say(tier: str, in_use: bool) -> None:
    log.warning("store tier %s is %s", tier, "in use again" if in_use else "out of use: it does not answer")


def _quietly(work: Callable[[Store], object], store: Store) -> None:
    try:
        work(store)
    except StoreError as error:
        log.info("a store did not take what was left there: %s", error)
