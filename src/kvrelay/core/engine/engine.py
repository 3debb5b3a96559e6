"""The mock engine: one machine, `step(now_s, event) -> effects`.

The worker process drives it with a real clock, the simulator with a virtual one. A step begins (`StepStarted`) as
soon as there is work and none is under way; the host sends `StepEnded` at its `ends_at_s`. Everything a client or a
router can see of a step is an effect of its end, in this order: the event batch, then the tokens.
"""

from __future__ import annotations

from msgspec import Struct

from kvrelay.core.contract.keys import Keyer
from kvrelay.core.engine.blockpool import BlockPool
from kvrelay.core.engine.cost import StepCost
from kvrelay.core.engine.kvcache import KvCache
from kvrelay.core.engine.payload import PayloadModel
from kvrelay.core.engine.scheduler import Plan, Scheduler, SchedulerLimits
from kvrelay.core.engine.sequence import EngineRequest, Sequence
from kvrelay.core.model.events import KvEvent
from kvrelay.core.model.prompt import TokenIds


class EngineSettings(Struct, frozen=True):
    """One worker's engine. Workers with equal `hash_seed` name blocks alike; equal `model` means equal weights."""

    model: str = "mock-model"
    block_size_tokens: int = 16
    blocks: int = 4096
    max_model_len: int = 32768
    limits: SchedulerLimits = SchedulerLimits()
    cost: StepCost = StepCost()
    hash_seed: str = "0"

    @property
    def capacity_tokens(self) -> int:
        return self.blocks * self.block_size_tokens


# --- events ------------------------------------------------------------------------------------------------------


class Submitted(Struct, frozen=True, eq=False):
    """A request came in. Prompt and output together fit `max_model_len`: the host saw to that."""

    request: EngineRequest


class Aborted(Struct, frozen=True):
    """The client left. Unknown ids are ignored: the end may already be on its way."""

    request_id: str


class StepEnded(Struct, frozen=True):
    """The step that `StepStarted` named is over."""

    step: int


class BlocksLoaded(Struct, frozen=True, eq=False):
    """A connector brought the payloads of a prompt's leading blocks."""

    token_ids: TokenIds
    payloads: list[bytes]
    adapter: str | None = None
    salt: str | None = None


class CacheResetAsked(Struct, frozen=True):
    """Forget all cached prefixes. Done only while no block is held."""


class PayloadsCorrupted(Struct, frozen=True):
    """A fault for drills: cached payloads change under their names (`name=None`: every n-th cached block)."""

    name: int | None = None
    every: int = 1


EngineEvent = Submitted | Aborted | StepEnded | BlocksLoaded | CacheResetAsked | PayloadsCorrupted


# --- effects -----------------------------------------------------------------------------------------------------


class StepStarted(Struct, frozen=True):
    """Send `StepEnded(step)` at `ends_at_s`."""

    step: int
    ends_at_s: float
    prefill_tokens: int
    decode_requests: int


class Admitted(Struct, frozen=True):
    """The request left the queue for the first time; what it found is final."""

    request_id: str
    queue_s: float
    prompt_tokens: int
    cached_tokens: int
    wrong_reuse_blocks: int


class Preempted(Struct, frozen=True):
    """The request lost its blocks and waits again."""

    request_id: str


class TokenMade(Struct, frozen=True):
    """One output token; `position` counts from 0."""

    request_id: str
    token_id: int
    position: int


class Finished(Struct, frozen=True):
    """The request's end: `length`, `stop` or `abort`."""

    request_id: str
    reason: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    wrong_reuse_blocks: int
    preemptions: int
    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None


class PublishBatch(Struct, frozen=True, eq=False):
    """One message of the event stream; `seq` counts from 0 in every life of the engine."""

    seq: int
    events: tuple[KvEvent, ...]


class CacheResetAnswered(Struct, frozen=True):
    """Whether the cache was reset."""

    success: bool


class CorruptionDone(Struct, frozen=True):
    """How many cached blocks have a wrong payload now."""

    blocks: int


EngineEffect = (
    StepStarted | Admitted | Preempted | TokenMade | Finished | PublishBatch | CacheResetAnswered | CorruptionDone
)


class Engine:
    """Composes block pool, prefix cache, scheduler and cost. No clock, no I/O, no chance."""

    def __init__(self, settings: EngineSettings) -> None:
        assert settings.max_model_len <= settings.capacity_tokens, (
            f"max_model_len {settings.max_model_len} exceeds the pool of {settings.capacity_tokens} tokens"
        )
        self.settings = settings
        self._pool = BlockPool(settings.blocks)
        self._cache = KvCache(
            self._pool,
            model=PayloadModel(settings.model),
            keyer=Keyer(settings.hash_seed.encode()),
            block_size_tokens=settings.block_size_tokens,
        )
        self._scheduler = Scheduler(self._cache, settings.limits)
        self._sequences: dict[str, Sequence] = {}
        self._plan: Plan | None = None
        self._steps = 0
        self._next_seq = 0

    @property
    def running_requests(self) -> int:
        return len(self._scheduler.running)

    @property
    def waiting_requests(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def kv_usage_ratio(self) -> float:
        """Blocks in use; cached blocks that nobody holds count as free."""
        return self._pool.used_ratio

    @property
    def unfinished_requests(self) -> int:
        return len(self._sequences)

    def cached_blocks(self, token_ids: TokenIds, *, adapter: str | None = None, salt: str | None = None) -> int:
        """Leading full blocks of these tokens that are findable now, the last one of a whole number of blocks too."""
        return self._cache.findable(token_ids, adapter=adapter, salt=salt)

    def prompt_names(self, request_id: str) -> list[int]:
        """The look-up names of a live request's full prompt blocks."""
        sequence = self._sequences[request_id]
        return sequence.names[: sequence.prompt_tokens // self.settings.block_size_tokens]

    def step(self, now_s: float, event: EngineEvent) -> tuple[EngineEffect, ...]:
        match event:
            case StepEnded():
                return self._end_step(now_s, event.step)
            case Submitted():
                return self._submit(now_s, event.request)
            case Aborted():
                return self._abort(now_s, event.request_id)
            case BlocksLoaded():
                self._cache.adopt(event.token_ids, event.payloads, adapter=event.adapter, salt=event.salt)
                return ()
            case CacheResetAsked():
                return (CacheResetAnswered(self._pool.clear()),)
            case PayloadsCorrupted():
                return (CorruptionDone(self._cache.corrupt(name=event.name, every=event.every)),)

    def payloads(self, token_ids: TokenIds, *, adapter: str | None, salt: str | None) -> list[bytes]:
        """What the leading blocks of these tokens hold, as far as they are cached now."""
        return self._cache.payloads(token_ids, adapter=adapter, salt=salt)

    def check(self) -> None:
        """Invariants; for tests after every step and for an idle process."""
        self._scheduler.check()
        known = {*self._scheduler.running, *self._scheduler.waiting}
        assert known == set(self._sequences.values()), "a sequence is in no queue"
        if not self._sequences:
            assert self._pool.free_blocks == self.settings.blocks, "blocks are held without a request"

    def _submit(self, now_s: float, request: EngineRequest) -> tuple[EngineEffect, ...]:
        assert request.request_id not in self._sequences, f"request id {request.request_id} is live"
        assert len(request.token_ids) > 0 and request.max_tokens > 0, f"{request.request_id} asks for nothing"
        assert len(request.token_ids) + request.max_tokens <= self.settings.max_model_len, (
            f"{request.request_id} exceeds the context"
        )
        sequence = self._cache.open(request, arrived_s=now_s)
        self._sequences[request.request_id] = sequence
        self._scheduler.submit(sequence)
        if self._plan is not None:
            return ()
        return tuple(self._begin_step(now_s))

    def _abort(self, now_s: float, request_id: str) -> tuple[EngineEffect, ...]:
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return ()
        return (self._finish(now_s, sequence, "abort"),)

    def _end_step(self, now_s: float, step: int) -> tuple[EngineEffect, ...]:
        plan = self._plan
        assert plan is not None and step == self._steps, f"step {step} ended, {self._steps} is under way"
        self._plan = None
        effects: list[EngineEffect] = []
        events = self._pool.take_changes()
        if events:
            effects.append(PublishBatch(self._next_seq, events))
            self._next_seq += 1
        for sequence, tokens in plan.parts:
            if not sequence.ended:
                self._advance(now_s, sequence, tokens, effects)
        effects += self._begin_step(now_s)
        return tuple(effects)

    def _advance(self, now_s: float, sequence: Sequence, tokens: int, effects: list[EngineEffect]) -> None:
        """What the step did for one sequence: one more chunk of its prefill, or one more token."""
        sequence.computed_tokens += tokens
        if sequence.tokens_to_compute > 0:
            return
        request = sequence.request
        token_id = self._cache.next_token(sequence)
        effects.append(TokenMade(request.request_id, token_id, sequence.output_tokens))
        sequence.append(token_id)
        if sequence.first_token_s is None:
            sequence.first_token_s = now_s
        if sequence.output_tokens >= request.max_tokens:
            effects.append(self._finish(now_s, sequence, "stop" if request.natural_end else "length"))

    def _begin_step(self, now_s: float) -> list[EngineEffect]:
        plan = self._scheduler.plan()
        effects: list[EngineEffect] = [Preempted(sequence.request.request_id) for sequence in plan.preempted]
        for sequence in plan.admitted:
            if sequence.admitted_s is None:
                effects.append(self._admit(now_s, sequence))
        if not plan.parts:
            assert not self._scheduler.running and not self._scheduler.waiting, "the engine is stuck"
            return effects
        self._plan = plan
        self._steps += 1
        duration_s = self.settings.cost.duration_s(
            prefill_tokens=plan.prefill_tokens, decode_requests=plan.decode_requests
        )
        effects.append(StepStarted(self._steps, now_s + duration_s, plan.prefill_tokens, plan.decode_requests))
        return effects

    def _admit(self, now_s: float, sequence: Sequence) -> Admitted:
        sequence.admitted_s = now_s
        sequence.cached_tokens = sequence.computed_tokens
        return Admitted(
            request_id=sequence.request.request_id,
            queue_s=now_s - sequence.arrived_s,
            prompt_tokens=sequence.prompt_tokens,
            cached_tokens=sequence.cached_tokens,
            wrong_reuse_blocks=sequence.wrong_reuse_blocks,
        )

    def _finish(self, now_s: float, sequence: Sequence, reason: str) -> Finished:
        self._scheduler.end(sequence)
        del self._sequences[sequence.request.request_id]
        admitted_s, first_token_s = sequence.admitted_s, sequence.first_token_s
        return Finished(
            request_id=sequence.request.request_id,
            reason=reason,
            prompt_tokens=sequence.prompt_tokens,
            output_tokens=sequence.output_tokens,
            cached_tokens=sequence.cached_tokens,
            wrong_reuse_blocks=sequence.wrong_reuse_blocks,
            preemptions=sequence.preemptions,
            queue_s=None if admitted_s is None else admitted_s - sequence.arrived_s,
            prefill_s=None if first_token_s is None or admitted_s is None else first_token_s - admitted_s,
            decode_s=None if first_token_s is None else now_s - first_token_s,
        )
