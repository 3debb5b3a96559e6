"""A store that simulated workers share: everything of the real one but its threads, sockets and clocks.

Every life of a worker has the mock worker's own connector (`edge/worker/kv_store.py`) over a tiered store of its own
(`edge/stores/tiered.py`), as its process would: names, headers, sealing, verifying, leases and the tier machine are the
code that runs in earnest. Their runtime is virtual. A job on a shared tier travels to its `Place` for a while, and what
it does there it does at its arrival; a worker that has ended by then never asked, one that is frozen asks when it goes
on. A tier without a place is in the memory of one life, and goes with it.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal

import msgspec

from kvrelay.core.engine.engine import BlocksLoaded, Finished
from kvrelay.core.engine.sequence import EngineRequest
from kvrelay.core.tiers.effects import Fetch
from kvrelay.core.tiers.outcome import Outcome
from kvrelay.edge.stores.config import StoreConfig
from kvrelay.edge.stores.keys import KeyRing
from kvrelay.edge.stores.runtime import Alarm, Crew, Job
from kvrelay.edge.stores.store import Store, StoreTimeout, StoreUnavailable
from kvrelay.edge.stores.tiered import TieredStore
from kvrelay.edge.stores.wrappers import Wrapped
from kvrelay.edge.worker.kv_store import LoadRefused, WorkerStore
from kvrelay.edge.worker.spec import MockSpec
from kvrelay.lab.sim.agenda import Action
from kvrelay.lab.sim.worker import Connector, Life, WorkerSetup

REFUSED_AFTER_S = 0.0005

Reach = Literal["ok", "refuse", "stall"]


class Place(Wrapped):
    """Where the objects of one shared tier lie, and the network before it. `refuse`: nobody listens there; `stall`: it
    accepts and answers nothing until it is `mended` or the deadline is over."""

    def __init__(self, inner: Store, *, read_s: float = 0.02, other_s: float = 0.001) -> None:
        super().__init__(inner)
        self.reach: Reach = "ok"
        self.slower_s = 0.0
        self.on_job: Callable[[Life, Job], Action | None] | None = None  # it sets out; to be done when it arrives
        self._read_s, self._other_s = read_s, other_s
        self._parked: list[Action] = []

    def takes_s(self, job: Job | None) -> float:
        if self.reach == "refuse":
            return REFUSED_AFTER_S
        return self.slower_s + (self._read_s if isinstance(job, Fetch) else self._other_s)

    def park(self, action: Action) -> None:
        """Do it when the place answers again."""
        self._parked.append(action)

    def mend(self) -> None:
        self.reach, self.slower_s = "ok", 0.0
        parked, self._parked = self._parked, []
        for action in parked:
            action()

    def _before(self, op: str, deadline_s: float) -> float:
        if self.reach == "refuse":
            raise StoreUnavailable("connection refused")
        if self.reach == "stall":
            raise StoreTimeout("no answer")
        return deadline_s


class SharedTiers:
    """All tiers of a fleet's store. `options` are those of a worker's `--store`; `places[i]` is where its i-th tier
    lies, None: in the worker's own memory, as its URL says."""

    def __init__(
        self,
        options: Mapping[str, Any],
        places: Sequence[Place | None],
        *,
        chunk_blocks: int,
        seed: int,
        ring: KeyRing | None = None,
    ) -> None:
        self.options = dict(options)
        self.places = places
        self.connections: dict[str, Connection] = {}  # of every worker's newest life
        self.on_loaded: Callable[[Life, BlocksLoaded], None] | None = None
        self.on_announced: Callable[[str, bytes, int], None] | None = None
        self._chunk_blocks = chunk_blocks
        self._seed = seed
        self._ring = ring

    def connect(self, life: Life, setup: WorkerSetup) -> Connector:
        """For `World(connect=...)`."""
        connection = Connection(life, self._spec(setup), self._opener(life), self.on_loaded)
        self.connections[life.id.name] = connection
        return connection

    def _spec(self, setup: WorkerSetup) -> MockSpec:
        return MockSpec(
            name=setup.name,
            model=setup.engine.model,
            block_size_tokens=setup.engine.block_size_tokens,
            blocks=setup.engine.blocks,
            store=self.options,
            store_chunk_blocks=self._chunk_blocks,
        )

    def _opener(self, life: Life) -> Callable[[StoreConfig], TieredStore]:
        seed = random.Random(f"{self._seed}/store/{life.id.name}/{life.id.incarnation}").getrandbits(64)

        def opened(config: StoreConfig) -> TieredStore:
            return TieredStore(
                config,
                stores=self.places,
                ring=self._ring,
                runtime=_Virtual(life),
                seed=seed,
                announce=self.on_announced,
                observe=_unobserved,
                state_changed=_unsaid,
            )

        return opened


class Connection:
    """One life's connector, see `Connector`."""

    def __init__(
        self,
        life: Life,
        spec: MockSpec,
        open_store: Callable[[StoreConfig], TieredStore],
        on_loaded: Callable[[Life, BlocksLoaded], None] | None,
    ) -> None:
        self.life = life
        self.store = WorkerStore(spec, open_store=open_store, wait=_Until)
        self._on_loaded = on_loaded

    def load(self, request: EngineRequest) -> None:
        self._go_on(self._load(request))

    async def _load(self, request: EngineRequest) -> None:
        try:
            loaded = await self.store.load(request, cached_blocks=len(self._held(request)))
        except LoadRefused:
            self.life.refuse(request)
            return
        if loaded is not None and self._on_loaded is not None:
            self._on_loaded(self.life, loaded)
        self.life.enter(request, loaded)

    def save(self, request: EngineRequest, finished: Finished) -> None:
        if finished.prefill_s is not None:
            self.store.observe_prefill(finished.prompt_tokens - finished.cached_tokens, finished.prefill_s)
        self._go_on(self.store.save(request, self._held(request)))

    def report(self, finished: Finished) -> bytes | None:
        told = self.store.reports.tell(finished.request_id, [finished.request_id], finished.cached_tokens)
        return None if told is None else msgspec.json.encode(told)

    def _held(self, request: EngineRequest) -> list[bytes]:
        return self.life.engine.payloads(request.token_ids, adapter=request.adapter, salt=request.salt)

    def _go_on(self, work: Coroutine[Future[Any], None, None]) -> None:
        """To its next wait. What ends a wait is not where the work goes on: futures swallow what is raised there."""
        try:
            future = work.send(None)
        except StopIteration:
            return
        future.add_done_callback(lambda _: self.life.later(0.0, partial(self._go_on, work)))


class _Until(Awaitable[Any]):
    """Awaits a future where no event loop is."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def __await__(self) -> Generator[Future[Any], None, Any]:
        if not self._future.done():
            yield self._future
        return self._future.result()


class _Virtual:
    """The `Runtime` of one life."""

    def __init__(self, life: Life) -> None:
        self._life = life

    def now_s(self) -> float:
        return self._life.agenda.now_s

    def wall_s(self) -> float:
        return self._life.agenda.now_s

    def alarm(self, ring: Callable[[], None]) -> Alarm:
        return _VirtualAlarm(self._life, ring)

    def crew(self, name: str, store: Store, hands: int) -> Crew:
        assert isinstance(store, Place), f"tier {name} is neither shared nor in memory"
        return _Travel(self._life, store)


class _VirtualAlarm:
    def __init__(self, life: Life, ring: Callable[[], None]) -> None:
        self._life, self._ring = life, ring
        self._next_s: float | None = None

    def set(self, at_s: float) -> None:
        """When it rings sooner anyhow, whoever wants it later says so again."""
        if self._next_s is None or at_s < self._next_s:
            self._next_s = at_s
            self._life.later(at_s - self._life.agenda.now_s, partial(self._rings, at_s))

    def stop(self) -> None:
        """Rings no more with the end of its life."""

    def _rings(self, set_for_s: float) -> None:
        if self._next_s == set_for_s:
            self._next_s = None
            self._ring()


class _Travel:
    """Jobs on their way from one life to one place."""

    def __init__(self, life: Life, place: Place) -> None:
        self._life, self._place = life, place

    def submit(self, work: Callable[[], object], job: Job | None = None) -> None:
        place, takes_s = self._place, self._place.takes_s(job)
        if job is not None and place.on_job is not None and place.reach == "ok":
            then = place.on_job(self._life, job)
            if then is not None:
                self._life.agenda.after(takes_s, then)
        self._life.later(takes_s, partial(self._arrive, work, job))

    def go_on(self, work: Callable[[], object], job: Job) -> None:
        self.submit(work, job)

    def close(self) -> None:
        """Nothing arrives after the end of its life."""

    def _arrive(self, work: Callable[[], object], job: Job | None) -> None:
        now_s = self._life.agenda.now_s
        if self._place.reach != "stall" or job is None or job.deadline_s <= now_s:
            work()
            return
        once = _Once(work)
        self._place.park(partial(self._life.later, 0.0, once))
        self._life.later(job.deadline_s - now_s, once)


class _Once:
    """Whichever comes first does it."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work: Callable[[], object] | None = work

    def __call__(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work()


def _unobserved(tier: str, op: str, outcome: Outcome, seconds: float) -> None: ...


def _unsaid(tier: str, in_use: bool) -> None: ...
