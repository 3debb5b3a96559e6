"""One simulated worker: an engine under virtual time, its event stream, and its lives."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, assert_never

from msgspec import Struct

from kvrelay.core.engine.engine import (
    Aborted,
    Admitted,
    BlocksLoaded,
    CacheResetAnswered,
    CacheResetAsked,
    CorruptionDone,
    Engine,
    EngineEffect,
    EngineEvent,
    EngineSettings,
    Finished,
    PayloadsCorrupted,
    Preempted,
    PublishBatch,
    StepEnded,
    StepStarted,
    Submitted,
    TokenMade,
)
from kvrelay.core.engine.sequence import EngineRequest
from kvrelay.core.model.events import KvBatch, WorkerSpec
from kvrelay.core.model.ids import WorkerId
from kvrelay.lab.sim.agenda import Action, Agenda


class WorkerSetup(Struct, frozen=True, kw_only=True):
    """A worker as an operator would configure it. `spec` None: what a mock worker of these settings says of itself."""

    name: str
    engine: EngineSettings = EngineSettings()
    replay_buffer_batches: int = 10_000
    sends_events: bool = True
    max_active_requests: int | None = None
    spec: WorkerSpec | None = None

    def described(self) -> WorkerSpec:
        if self.spec is not None:
            return self.spec
        return WorkerSpec(
            url=f"http://{self.name}.sim",
            models=(self.engine.model,),
            block_size_tokens=self.engine.block_size_tokens,
            max_active_requests=self.max_active_requests,
            sends_events=self.sends_events,
            engine="mock",
            models_payload=False,
        )


class Listener(Protocol):
    """Who waits for the tokens of one engine request."""

    def on_token(self, token_id: int) -> None: ...
    def on_finished(self, finished: Finished) -> None: ...
    def on_lost(self) -> None: ...
    def on_refused(self) -> None: ...


class Connector(Protocol):
    """One life's way to a store that workers share (`lab/sim/store.py`)."""

    def load(self, request: EngineRequest) -> None:
        """Bring what the store has; some time later `Life.enter` or `Life.refuse`."""
        ...

    def save(self, request: EngineRequest, finished: Finished) -> None:
        """The request has ended; what the engine holds of its prompt may be kept."""
        ...

    def report(self, finished: Finished) -> bytes | None:
        """What the worker tells with its answer of what was loaded for it, as JSON; None: nothing."""
        ...


class Insider(Protocol):
    """Who is told what no gateway can see: the truth about an engine, at the moment it becomes true."""

    def published(self, batch: KvBatch) -> None: ...
    def admitted(self, worker: str, names: Sequence[int], admitted: Admitted) -> None: ...
    def life_ended(self, worker: str) -> None: ...


class Life:
    """From one start of the worker's process to its end: an engine, a stream that counts from 0, a replay buffer."""

    def __init__(
        self,
        worker: WorkerId,
        setup: WorkerSetup,
        agenda: Agenda,
        publish: Callable[[KvBatch], None],
        insider: Insider | None,
    ) -> None:
        self.id = worker
        self.engine = Engine(setup.engine)
        self.published: deque[KvBatch] = deque(maxlen=setup.replay_buffer_batches)
        self.ended = False
        self.agenda = agenda
        self._publish = publish if setup.sends_events else None
        self._insider = insider
        self.connector: Connector | None = None  # set before the first request, where there is a store
        self._listeners: dict[str, Listener] = {}
        self._requests: dict[str, EngineRequest] = {}  # to be saved when they end
        self._frozen = False
        self._held_back: list[Action] = []

    def takes(self, request: EngineRequest) -> bool:
        """Whether prompt and output fit the engine's context."""
        return len(request.token_ids) + request.max_tokens <= self.engine.settings.max_model_len

    def submit(self, request: EngineRequest, listener: Listener) -> None:
        self._listeners[request.request_id] = listener
        if self.connector is None:
            self._step(Submitted(request))
        else:
            self.connector.load(request)

    def enter(self, request: EngineRequest, loaded: BlocksLoaded | None) -> None:
        """The connector is done with the request: with what it brought, it goes to the engine if it is still wanted."""
        if loaded is not None:
            self.engine.step(self.agenda.now_s, loaded)
        if request.request_id in self._listeners:
            self._requests[request.request_id] = request
            self._step(Submitted(request))

    def refuse(self, request: EngineRequest) -> None:
        """The store could not answer, and this worker is not to compute instead."""
        listener = self._listeners.pop(request.request_id, None)
        if listener is not None:
            listener.on_refused()

    def report(self, finished: Finished) -> bytes | None:
        """What goes with the answer, see `Connector`."""
        return None if self.connector is None else self.connector.report(finished)

    def later(self, delay_s: float, action: Action) -> None:
        """Something that this process does after a while: not if it has ended, and not while it stands still."""
        self.agenda.after(delay_s, partial(self._unless_stopped, action))

    def abort(self, request_id: str) -> None:
        """The listener hears no more of this request."""
        self._requests.pop(request_id, None)
        if self._listeners.pop(request_id, None) is not None:
            self._step(Aborted(request_id))

    def reset_cache(self) -> bool:
        """False while a block is held."""
        (answer,) = self.engine.step(self.agenda.now_s, CacheResetAsked())
        assert isinstance(answer, CacheResetAnswered)
        return answer.success

    def corrupt(self, *, every: int) -> int:
        """Wrong payloads under the right names; how many blocks were hit."""
        (done,) = self.engine.step(self.agenda.now_s, PayloadsCorrupted(every=every))
        assert isinstance(done, CorruptionDone)
        return done.blocks

    def freeze(self) -> None:
        """The process stands still: what is under way does not end, and no question is answered."""
        self._frozen = True

    def thaw(self) -> None:
        self._frozen = False
        held_back, self._held_back = self._held_back, []
        for action in held_back:
            self.agenda.after(0.0, action)

    @property
    def answers(self) -> bool:
        return not self.ended and not self._frozen

    def end(self) -> None:
        """The process is gone; whoever listened learns that the connection broke."""
        self.ended = True
        if self._insider is not None:
            self._insider.life_ended(self.id.name)
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener.on_lost()

    def _step(self, event: EngineEvent) -> None:
        for effect in self.engine.step(self.agenda.now_s, event):
            self._act(effect)

    def _unless_stopped(self, action: Action) -> None:
        if self.ended:
            return
        if self._frozen:
            self._held_back.append(partial(self._unless_stopped, action))
        else:
            action()

    def _end_step(self, started: StepStarted) -> None:
        if self.ended:
            return
        if self._frozen:
            self._held_back.append(partial(self._end_step, started))
        else:
            self._step(StepEnded(started.step))

    def _act(self, effect: EngineEffect) -> None:
        match effect:
            case TokenMade():
                listener = self._listeners.get(effect.request_id)
                if listener is not None:
                    listener.on_token(effect.token_id)
            case StepStarted():
                self.agenda.at(effect.ends_at_s, lambda: self._end_step(effect))
            case PublishBatch():
                batch = KvBatch(self.id, 0, effect.seq, effect.events)
                if self._insider is not None:
                    self._insider.published(batch)
                if self._publish is not None:
                    self.published.append(batch)
                    self._publish(batch)
            case Finished():
                request = self._requests.pop(effect.request_id, None)
                if request is not None and self.connector is not None:
                    self.connector.save(request, effect)
                listener = self._listeners.pop(effect.request_id, None)
                if listener is not None:
                    listener.on_finished(effect)
            case Admitted():
                if self._insider is not None:
                    names = self.engine.prompt_names(effect.request_id)
                    self._insider.admitted(self.id.name, names, effect)
            case Preempted():
                pass  # nobody outside sees it
            case CacheResetAnswered() | CorruptionDone():
                raise AssertionError(f"{effect} was not asked for here")
            case _:
                assert_never(effect)


Connect = Callable[[Life, WorkerSetup], Connector]


class Worker:
    """All lives of one worker, one after the other."""

    def __init__(
        self,
        setup: WorkerSetup,
        agenda: Agenda,
        publish: Callable[[KvBatch], None],
        insider: Insider | None = None,
        connect: Connect | None = None,
    ) -> None:
        self.setup = setup
        self.spec = setup.described()
        self.lives = 0
        self.life: Life | None = None  # None while the process is down
        self._agenda = agenda
        self._publish = publish
        self._insider = insider
        self._connect = connect

    @property
    def name(self) -> str:
        return self.setup.name

    def start(self) -> Life:
        assert self.life is None, f"{self.name} is running already"
        self.lives += 1
        worker = WorkerId(self.name, f"life-{self.lives}")
        self.life = Life(worker, self.setup, self._agenda, self._publish, self._insider)
        if self._connect is not None:
            self.life.connector = self._connect(self.life, self.setup)
        return self.life

    def kill(self) -> None:
        life, self.life = self.life, None
        if life is not None:
            life.end()
