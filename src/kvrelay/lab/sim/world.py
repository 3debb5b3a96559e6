"""A fleet under virtual time: the very `Router` of the gateway, N mock engines, and everything between them.

A world is a deterministic discrete-event simulation. The router and the engines are the machines of `core`, fed with
the same events as by their live hosts (`edge/gateway/host.py`, `edge/worker/engine_host.py`); sockets, processes and
clocks are replaced by an agenda. Same setups, settings, seed, weather and calls give the same receipts, byte for byte,
for any PYTHONHASHSEED. Virtual times say something about the order of events and nothing about a GPU.

    world = World([WorkerSetup(name="w0"), WorkerSetup(name="w1")], seed=7)
    world.submit(0.0, SimRequest(request_id="r0", token_ids=tokens, max_tokens=4, session_id="a"))
    world.at(0.002, lambda: world.kill("w0"))
    world.run()
    world.receipts, world.digest(), world.answers["r0"].token_ids

Hooks, from the outside in:

- arrivals: `submit(at_s, request)`; `leave(at_s, request_id)` lets a client hang up.
- a `Weather` (see there): what happens to each attempt (latency, refusals, broken and silent streams), to each event
  batch (delay, loss, duplication, order), to replays, probes and scrapes.
- workers: `kill`, `restart` (a new incarnation with an empty cache), `freeze` and `thaw` (a process that stands still),
  `drain`, `resume`, `add`, `remove`, `reset_cache`, `corrupt`. They act now; `at(when_s, action)` puts anything off.
- `restart_router()`: a new process of the gateway; open requests break without a receipt.
- `feed(event)`: any event of `core/model/events.py` straight into the router.
- `observer(now_s, event, effects)`: called after every step of the router, for invariants and histories.
- `connect`: gives every life of a worker a way to a store that they share (`lab/sim/store.py`).
- questions: `receipts`, `answers` (what each client got), `reports` (counts), `cached_blocks(name, token_ids)` (what an
  engine really holds, the truth that the index estimates), `check()` (the invariants of all machines), `digest()`.

`run()` goes on until every submitted request has its receipt; `run(until_s=...)` until that time.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import assert_never

import msgspec
from msgspec.structs import replace

from kvrelay.core.model.effects import (
    BreakOff,
    CancelAttempt,
    Dispatch,
    Effect,
    Hasten,
    PassThrough,
    Refuse,
    Report,
    RequestReplay,
    RequestSnapshot,
    ShareSession,
    WakeAt,
    WriteReceipt,
)
from kvrelay.core.model.events import (
    AttemptFailed,
    ClientLeft,
    Event,
    KvBatch,
    RequestArrived,
    ResidencyReset,
    SnapshotUnavailable,
    WokeUp,
    WorkerDrained,
    WorkerLeft,
    WorkerResumed,
)
from kvrelay.core.model.prompt import Prompt, TokenIds
from kvrelay.core.model.units import Fault
from kvrelay.core.receipts.receipt import Receipt
from kvrelay.core.routing.router import Router
from kvrelay.core.routing.settings import RouterSettings
from kvrelay.lab.sim.agenda import Action, Agenda
from kvrelay.lab.sim.attempt import Answer, Attempt, HostTimes, SimRequest
from kvrelay.lab.sim.watch import Watch
from kvrelay.lab.sim.weather import Weather
from kvrelay.lab.sim.worker import Connect, Insider, Worker, WorkerSetup

Observer = Callable[[float, Event, tuple[Effect, ...]], None]

__all__ = ["HostTimes", "SimRequest", "Weather", "WorkerSetup", "World"]


class _Live:
    """A request between its arrival and its receipt."""

    __slots__ = ("answer", "attempt", "request")

    def __init__(self, request: SimRequest) -> None:
        self.request = request
        self.answer = Answer()
        self.attempt: Attempt | None = None


class World:
    """One router, its fleet and its clients. `seed` feeds the router's draws and the jitter of probes."""

    def __init__(
        self,
        setups: Iterable[WorkerSetup],
        *,
        settings: RouterSettings = RouterSettings(),
        seed: int = 0,
        weather: Weather | None = None,
        times: HostTimes = HostTimes(),
        interval_s: float = 1.0,
        observer: Observer | None = None,
        keep_answers: bool = True,
        insider: Insider | None = None,
        connect: Connect | None = None,
    ) -> None:
        self.router = Router(settings)
        self.receipts: list[Receipt] = []
        self.answers: dict[str, Answer] = {}
        self.reports: dict[str, int] = {}
        self.workers: dict[str, Worker] = {}
        self.submitted = 0
        self.promised = 0  # requests that will be submitted; `run` waits for them too
        self.on_receipt: Callable[[Receipt], None] | None = None
        self.cut_by_restart = 0  # requests that were open when the gateway's process ended
        self.weather = weather or Weather()
        self.agenda = Agenda()
        self._times = times
        self._interval_s = interval_s
        self._observer = observer
        self._keep_answers = keep_answers
        self._insider = insider
        self._connect = connect
        self._draw = random.Random(seed)  # as the gateway draws, request by request
        self._jitter = random.Random(f"{seed}/jitter")
        self._watches: dict[str, Watch] = {}
        self._live: dict[str, _Live] = {}
        for setup in setups:
            self.add(setup)

    @property
    def now_s(self) -> float:
        return self.agenda.now_s

    @property
    def unsettled(self) -> int:
        """Requests submitted, arrived or not, that have no receipt yet and will get one."""
        return self.submitted - len(self.receipts) - self.cut_by_restart

    # --- clients -----------------------------------------------------------------------------------------------------

    def submit(self, at_s: float, request: SimRequest) -> None:
        """The request arrives at the gateway then. Its id must be unique in this world."""
        self.submitted += 1
        self.agenda.at(at_s, partial(self._arrive, request))

    def leave(self, at_s: float, request_id: str) -> None:
        """The client closes its connection then, if it still waits."""
        self.agenda.at(at_s, partial(self._client_leaves, request_id))

    def at(self, when_s: float, action: Action) -> None:
        """Anything, then."""
        self.agenda.at(when_s, action)

    # --- workers -----------------------------------------------------------------------------------------------------

    def add(self, setup: WorkerSetup) -> None:
        """A worker that runs already is added to the configuration, and asked who it is at once."""
        name = setup.name
        assert name not in self.workers, f"there is a worker {name} already"
        worker = Worker(setup, self.agenda, partial(self._publish, name), self._insider, self._connect)
        self.workers[name] = worker
        self._watches[name] = self._watch_of(worker)
        worker.start()
        self._watches[name].start()

    def _watch_of(self, worker: Worker) -> Watch:
        return Watch(
            worker,
            agenda=self.agenda,
            weather=self.weather,
            feed=self.feed,
            interval_s=self._interval_s,
            uniform=self._jitter.random,
        )

    def remove(self, name: str) -> None:
        """It is taken out of the configuration; its process goes on with what it has."""
        self._watches.pop(name).close()
        self.feed(WorkerLeft(name))

    def kill(self, name: str) -> None:
        """The process ends at once: connections break, questions are refused, the cache is gone."""
        self.workers[name].kill()

    def restart(self, name: str) -> None:
        """A new process takes its place (the old one, if any, ends). The router learns of it by probe or by event."""
        self.workers[name].kill()
        self.workers[name].start()

    def freeze(self, name: str) -> None:
        life = self.workers[name].life
        if life is not None:
            life.freeze()

    def thaw(self, name: str) -> None:
        life = self.workers[name].life
        if life is not None:
            life.thaw()

    def drain(self, name: str) -> None:
        self.feed(WorkerDrained(name))

    def resume(self, name: str) -> None:
        self.feed(WorkerResumed(name))

    def reset_cache(self, name: str) -> bool:
        """Through the gateway: the worker drops its cache and the index its residency. False: blocks are held."""
        life = self.workers[name].life
        if life is None or not life.reset_cache():
            return False
        self.feed(ResidencyReset(name))
        return True

    def corrupt(self, name: str, *, every: int = 1) -> int:
        """Wrong payloads under right names; how many blocks were hit."""
        life = self.workers[name].life
        return 0 if life is None else life.corrupt(every=every)

    def cached_blocks(
        self, name: str, token_ids: TokenIds, *, adapter: str | None = None, salt: str | None = None
    ) -> int:
        """Leading full blocks of these tokens that the worker really holds now."""
        life = self.workers[name].life
        return 0 if life is None else life.engine.cached_blocks(token_ids, adapter=adapter, salt=salt)

    def restart_router(self) -> None:
        """The gateway's process ends and another begins: open requests break, beliefs are gone, epochs are kept."""
        for live in self._live.values():
            self._cancel(live)
            live.answer.ending = "gateway_lost"
        self.cut_by_restart += len(self._live)
        self._live.clear()
        self.router = Router(self.router.settings, self.router.epochs.state)
        for name, watch in self._watches.items():
            watch.close()
            self._watches[name] = self._watch_of(self.workers[name])
        for watch in tuple(self._watches.values()):
            watch.start()

    # --- time --------------------------------------------------------------------------------------------------------

    def run(self, until_s: float | None = None) -> None:
        """Lets virtual time pass until all requests are settled, or until `until_s`."""
        agenda = self.agenda
        if until_s is None:
            while self.unsettled or self.promised:
                agenda.step()
            return
        while True:
            next_s = agenda.next_s()
            if next_s is None or next_s > until_s:
                break
            agenda.step()
        agenda.now_s = max(agenda.now_s, until_s)

    def check(self) -> None:
        """Invariants of the router and of every engine."""
        self.router.check()
        for worker in self.workers.values():
            if worker.life is not None:
                worker.life.engine.check()

    def digest(self) -> str:
        """Over all receipts in the order in which they were written."""
        summed = hashlib.sha256()
        for receipt in self.receipts:
            summed.update(msgspec.json.encode(receipt) + b"\n")
        return summed.hexdigest()

    # --- the host ----------------------------------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        """One event into the router, its effects into the world."""
        effects = self.router.step(self.agenda.now_s, event)
        for effect in effects:
            self._act(effect)
        if self._observer is not None:
            self._observer(self.agenda.now_s, event, effects)

    def _arrive(self, request: SimRequest) -> None:
        live = self._live[request.request_id] = _Live(request)
        if self._keep_answers:
            self.answers[request.request_id] = live.answer
        self.agenda.after(self._times.total_s, partial(self._expire, live))
        router, tokens = self.router, request.token_ids
        epoch = router.epochs.tag(request.tenant.name, request.adapter)
        request = live.request = replace(request, tenant=router.epochs.salted(request.tenant, epoch))
        keys = {
            size: router.keyer.prompt_keys(tokens, size, adapter=request.adapter, salt=request.tenant.salt)
            for size in router.block_sizes()
        }
        self.feed(
            RequestArrived(
                request_id=request.request_id,
                prompt=Prompt(len(tokens), keys),
                model=request.model,
                adapter=request.adapter,
                session_id=request.session_id,
                tenant=request.tenant,
                priority=request.priority,
                deadline_ms=request.deadline_ms,
                epoch=epoch,
                draw=self._draw.getrandbits(64),
            )
        )

    def _client_leaves(self, request_id: str) -> None:
        live = self._live.get(request_id)
        if live is not None:
            live.answer.ending = "left"
            self.feed(ClientLeft(request_id, tuple(live.answer.gaps_ms)))

    def _expire(self, live: _Live) -> None:
        request_id = live.request.request_id
        if self._live.get(request_id) is not live:
            return
        if live.attempt is not None and not live.attempt.over:
            live.attempt.fail(Fault.TOTAL_TIMEOUT)
        else:
            self.feed(AttemptFailed(request_id, 0, Fault.TOTAL_TIMEOUT))

    def _publish(self, name: str, batch: KvBatch) -> None:
        watch = self._watches.get(name)
        if watch is not None:
            watch.send(batch)

    def _act(self, effect: Effect) -> None:
        match effect:
            case Dispatch():
                self._dispatch(effect)
            case WakeAt():
                self.agenda.at(effect.at, self._wake)
            case WriteReceipt():
                del self._live[effect.receipt.request_id]
                self.receipts.append(effect.receipt)
                if self.on_receipt is not None:
                    self.on_receipt(effect.receipt)
            case RequestReplay():
                self._watches[effect.worker.name].replay(effect)
            case Report():
                self.reports[effect.kind] = self.reports.get(effect.kind, 0) + effect.count
            case Refuse():
                self._end_answer(effect.request_id, "refused")
            case PassThrough():
                self._end_answer(effect.request_id, "passed_through")
            case BreakOff():
                self._end_answer(effect.request_id, "broken_off")
            case CancelAttempt():
                self._cancel(self._live[effect.request_id])
            case Hasten():
                self._hasten(effect)
            case RequestSnapshot():
                self.agenda.after(0.0, partial(self.feed, SnapshotUnavailable(effect.worker, effect.rank, "no agent")))
            case ShareSession():
                pass  # this gateway has no sibling to tell
            case _:
                assert_never(effect)

    def _dispatch(self, effect: Dispatch) -> None:
        live = self._live[effect.request_id]
        live.attempt = Attempt(
            live.request,
            live.answer,
            effect,
            self.weather.attempt(self.agenda.now_s, effect),
            worker=self.workers[effect.worker.name],
            agenda=self.agenda,
            feed=self.feed,
            times=self._times,
            migrates=self.router.settings.migrate,
        )
        live.attempt.begin()

    def _wake(self) -> None:
        self.feed(WokeUp())

    def _end_answer(self, request_id: str, ending: str) -> None:
        live = self._live[request_id]
        live.answer.ending = ending
        self._cancel(live)

    def _cancel(self, live: _Live) -> None:
        if live.attempt is not None and not live.attempt.over:
            live.attempt.cancel()

    def _hasten(self, effect: Hasten) -> None:
        attempt = self._live[effect.request_id].attempt
        if attempt is not None and attempt.number == effect.attempt:
            attempt.hasten()
