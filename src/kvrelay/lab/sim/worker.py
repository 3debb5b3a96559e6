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
from kvrelay.lab.sim.agenda import Agenda


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
        self._agenda = agenda
        self._publish = publish if setup.sends_events else None
        self._insider = insider
        self._listeners: dict[str, Listener] = {}
        self._frozen = False
        self._held_back: list[StepStarted] = []

    def takes(self, request: EngineRequest) -> bool:
        """Whether prompt and output fit the engine's context."""
        return len(request.token_ids) + request.max_tokens <= self.engine.settings.max_model_len

    def submit(self, request: EngineRequest, listener: Listener) -> None:
        self._listeners[request.request_id] = listener
        self._step(Submitted(request))

    def abort(self, request_id: str) -> None:
        """The listener hears no more of this request."""
        if self._listeners.pop(request_id, None) is not None:
            self._step(Aborted(request_id))

    def reset_cache(self) -> bool:
        """False while a block is held."""
        (answer,) = self.engine.step(self._agenda.now_s, CacheResetAsked())
        assert isinstance(answer, CacheResetAnswered)
        return answer.success

    def corrupt(self, *, every: int) -> int:
        """Wrong payloads under the right names; how many blocks were hit."""
        (done,) = self.engine.step(self._agenda.now_s, PayloadsCorrupted(every=every))
        assert isinstance(done, CorruptionDone)
        return done.blocks

    def freeze(self) -> None:
        """The process stands still: what is under way does not end, and no question is answered."""
        self._frozen = True

    def thaw(self) -> None:
        self._frozen = False
        held_back, self._held_back = self._held_back, []
        for started in held_back:
            self._agenda.after(0.0, partial(self._end_step, started))

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
        for effect in self.engine.step(self._agenda.now_s, event):
            self._act(effect)

    def _end_step(self, started: StepStarted) -> None:
        if self.ended:
            return
        if self._frozen:
            self._held_back.append(started)
        else:
            self._step(StepEnded(started.step))

    def _act(self, effect: EngineEffect) -> None:
        match effect:
            case TokenMade():
                listener = self._listeners.get(effect.request_id)
                if listener is not None:
                    listener.on_token(effect.token_id)
            case StepStarted():
                self._agenda.at(effect.ends_at_s, lambda: self._end_step(effect))
            case PublishBatch():
                batch = KvBatch(self.id, 0, effect.seq, effect.events)
                if self._insider is not None:
                    self._insider.published(batch)
                if self._publish is not None:
                    self.published.append(batch)
                    self._publish(batch)
            case Finished():
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


class Worker:
    """All lives of one worker, one after the other."""

    def __init__(
        self, setup: WorkerSetup, agenda: Agenda, publish: Callable[[KvBatch], None], insider: Insider | None = None
    ) -> None:
        self.setup = setup
        self.spec = setup.described()
        self.lives = 0
        self.life: Life | None = None  # None while the process is down
        self._agenda = agenda
        self._publish = publish
        self._insider = insider

    @property
    def name(self) -> str:
        return self.setup.name

    def start(self) -> Life:
        assert self.life is None, f"{self.name} is running already"
        self.lives += 1
        worker = WorkerId(self.name, f"life-{self.lives}")
        self.life = Life(worker, self.setup, self._agenda, self._publish, self._insider)
        return self.life

    def kill(self) -> None:
        life, self.life = self.life, None
        if life is not None:
            life.end()
