"""Plays one schedule on a simulated fleet, heals it, and says what was wrong, if anything."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct

from kvrelay.core.engine.cost import StepCost
from kvrelay.core.engine.engine import EngineSettings
from kvrelay.core.engine.sequence import EngineRequest
from kvrelay.core.model.effects import Effect
from kvrelay.core.model.events import (
    AttemptFailed,
    EpochRotated,
    Event,
    EventsHeard,
    FirstTokenSeen,
    KvBatch,
    PolicyChanged,
    ReplayArrived,
    RequestFinished,
    ResidencyReset,
    SessionClosed,
    WokeUp,
    WorkerSpec,
)
from kvrelay.core.model.units import Trigger
from kvrelay.core.routing.settings import RouterSettings
from kvrelay.lab.drills.fuzz.invariant import Broken
from kvrelay.lab.drills.fuzz.prompts import ADAPTER, MODEL, adapter_of, salted_now, tenant_of, tokens_of, weights_of
from kvrelay.lab.drills.fuzz.schedule import BLOCK_TOKENS, HEAL_S, POLICIES, Ask, Hit, Schedule, TierPlan
from kvrelay.lab.drills.fuzz.verdict import books_are_closed, claims_are_true, everybody_serves, texts_are_right
from kvrelay.lab.drills.fuzz.watch import CHECK_EVERY, MAX_PENDING_BATCHES, MAX_SESSIONS, Watchman
from kvrelay.lab.drills.fuzz.weather import FuzzWeather
from kvrelay.lab.sim.attempt import HostTimes, SimRequest
from kvrelay.lab.sim.worker import WorkerSetup
from kvrelay.lab.sim.world import World

if TYPE_CHECKING:
    from kvrelay.lab.drills.fuzz.store import StoreUnderAttack

INTERVAL_S = 0.5
RECOVERY_S = 12.0  # a worker that was slow is tried again after ten seconds
LONG_RECOVERY_S = 32.0  # and one that failed again and again after thirty
BURSTS, BURST_EVERY_S, BURST_TOKENS = 8, 0.4, 80
SETTLE_S = 4.0
MAX_VIRTUAL_S = 200.0
KEPT_EVENTS = 200


class Failure(Struct, frozen=True, kw_only=True):
    """What did not hold, and when."""

    what: str
    at_s: float
    where: str = ""  # of a mistake in the code itself


class Run:
    """One world and one schedule."""

    def __init__(self, schedule: Schedule) -> None:
        plan = schedule.fleet
        self.schedule = schedule
        self.weather = FuzzWeather()
        self.requests: dict[str, SimRequest] = {}
        self._watchman = Watchman(
            attempts=plan.attempts,
            queue_wait_s=plan.queue_wait_s,
            max_orphans=plan.max_orphans,
            requests=self.requests,
            published=self.weather.published,
        )
        self._seen: list[Event] = []
        self._asks: dict[str, Ask] = {}
        self._removed: set[str] = set()
        self._drained: set[str] = set()
        self._store = None if plan.store is None else _under_attack(plan.store, schedule.seed, self._kill)
        self.world = World(
            (),
            settings=RouterSettings(
                policy=plan.policy,
                scorer=plan.scorer,
                affinity_ttl_s=plan.ttl_s,
                affinity_hard=plan.hard,
                max_sessions=MAX_SESSIONS,
                retry_attempts=plan.attempts,
                retry_budget_ratio=1.0,
                migrate=plan.migrate,
                queue_depth=plan.queue_depth,
                queue_wait_s=plan.queue_wait_s,
                speculative_deadline_s=5.0,
                max_orphan_blocks=plan.max_orphans,
                max_pending_batches=MAX_PENDING_BATCHES,
                replay_timeout_s=0.5,
                key_seed=b"fuzz",
            ),
            seed=schedule.seed,
            weather=self.weather,
            times=HostTimes(first_byte_s=1.5, idle_s=1.0, total_s=30.0),
            interval_s=INTERVAL_S,
            observer=self._observe,
            connect=None if self._store is None else self._store.tiers.connect,
        )

    def play(self) -> Failure | None:
        """None: everything held."""
        try:
            for number in range(self.schedule.fleet.workers):  # who observes must know the world
                self.world.add(self._worker(f"w{number}"))
            self._faulty_part()
            self._heal()
            self._quiet_part()
            self._judge()
        except Broken as broken:
            return Failure(what=str(broken), at_s=round(self.world.now_s, 4))
        except Exception as mistake:  # an assertion of core, or a plain bug: both are findings
            frames = traceback.extract_tb(mistake.__traceback__)
            where = " <- ".join(f"{frame.name}:{frame.lineno}" for frame in reversed(frames[-3:]))
            what = f"{type(mistake).__name__}: {mistake}"
            return Failure(what=what, at_s=round(self.world.now_s, 4), where=where)
        return None

    def _worker(self, name: str) -> WorkerSetup:
        plan = self.schedule.fleet
        engine = EngineSettings(
            model=weights_of(plan, name),
            block_size_tokens=BLOCK_TOKENS,
            blocks=plan.blocks,
            max_model_len=plan.blocks * BLOCK_TOKENS,
            cost=StepCost(prefill_tokens_per_s=4_000.0, decode_ms=4.0),
        )
        spec = WorkerSpec(
            url=f"http://{name}.sim",
            models=(MODEL,),
            adapters=(ADAPTER,),
            block_size_tokens=BLOCK_TOKENS,
            max_active_requests=plan.max_active or None,
            engine="mock",
        )
        return WorkerSetup(name=name, engine=engine, replay_buffer_batches=plan.replay_batches, spec=spec)

    def _observe(self, now_s: float, event: Event, effects: tuple[Effect, ...]) -> None:
        if not isinstance(event, WokeUp):
            self._seen.append(event)
            del self._seen[:-KEPT_EVENTS]
        self._watchman.after(now_s, self.world.router, event, effects)
        if self._store is not None and self._watchman.steps % CHECK_EVERY == 0:
            self._store.look_at()

    # --- what goes wrong ---------------------------------------------------------------------------------------------

    def _faulty_part(self) -> None:
        for op in self.schedule.ops:
            if isinstance(op, Ask):
                self._submit(op)
            else:
                self.world.at(op.at_s, lambda op=op: self._hit(op))  # type: ignore[misc]
        self.world.run(until_s=HEAL_S)

    def _submit(self, ask: Ask) -> None:
        if ask.beside >= 0:
            self.world.at(ask.at_s, lambda: self._submit_beside(ask))
            return
        request = SimRequest(
            request_id=ask.id,
            token_ids=tokens_of(ask.root, ask.turns, ask.tokens),
            max_tokens=ask.max_tokens,
            session_id=ask.session,
            model=ADAPTER if ask.adapter else MODEL,
            adapter=adapter_of(ask),
            tenant=tenant_of(ask),
            priority=ask.priority,
            deadline_ms=ask.deadline_ms,
        )
        self._asks[ask.id] = ask
        self.requests[ask.id] = request
        self.world.submit(ask.at_s, request)
        if ask.leaves_after_s is not None:
            self.world.leave(ask.at_s + ask.leaves_after_s, ask.id)

    def _submit_beside(self, ask: Ask) -> None:
        """As the gateway would do it now, and at this worker."""
        life = self.world.workers[f"w{ask.beside}"].life
        if life is None:
            return
        request = EngineRequest(
            ask.id,
            tokens_of(ask.root, ask.turns, ask.tokens),
            ask.max_tokens,
            adapter=adapter_of(ask),
            salt=salted_now(ask, self.world.router.epochs).salt,
        )
        life.submit(request, _Nobody())
        if ask.leaves_after_s is not None:
            self.world.at(ask.at_s + ask.leaves_after_s, lambda: life.abort(ask.id))

    def _hit(self, hit: Hit) -> None:
        if hit.kind.startswith("store_"):
            assert self._store is not None, "a hit at a store, and there is none"
            self._store.hit(hit)
            return
        if hit.worker < 0:
            self._hit_gateway(hit)
            return
        name = f"w{hit.worker}"
        if name not in self._removed:
            self._hit_worker(hit, name)

    def _hit_worker(self, hit: Hit, name: str) -> None:
        world, weather = self.world, self.weather
        match hit.kind:
            case "kill":
                world.kill(name)
            case "restart":
                world.restart(name)
            case "freeze":
                world.freeze(name)
            case "thaw":
                world.thaw(name)
            case "cut_off":
                weather.cut_off.add(name)
            case "rejoin":
                weather.cut_off.discard(name)
            case "slow":
                weather.slower_s[name] = hit.amount
            case "drain":
                self._drained.add(name)
                world.drain(name)
            case "resume":
                self._drained.discard(name)
                world.resume(name)
            case "lose":
                weather.lost_batches[name] = int(hit.amount)
            case "double":
                weather.doubled.add(name)
            case "shuffle":
                weather.shuffled.add(name)
            case "no_replay":
                weather.no_replay.add(name)
            case "part_replay":
                weather.replay_keeps[name] = int(hit.amount)
            case "calm_events":
                weather.calm_events()
            case "refuse_429" | "refuse_503" | "refuse_500":
                weather.refusals[name] = int(hit.kind.removeprefix("refuse_")), int(hit.amount)
            case "break_after" | "silent_after":
                weather.strike_next(name, int(hit.amount), silent=hit.kind == "silent_after")
            case "reset_cache":
                world.reset_cache(name)
            case "remove":
                self._remove(name)
            case "resync":
                world.feed(ResidencyReset(name, replay=True))
            case "unheard":
                self._unheard(name)
            case "stale_batch":
                self._former_life(name)
            case _:
                raise ValueError(f"no such hit: {hit.kind}")

    def _former_life(self, name: str) -> None:
        """What a life that is over had published arrives only now, as far as its numbers are still to come here."""
        known = next((seen for seen in self.world.router.status(self.world.now_s).workers if seen.name == name), None)
        next_seq = 0 if known is None else known.targets[0].next_event_seq or 0
        for event in tuple(self._seen):
            if not isinstance(event, KvBatch) or event.worker.name != name or event.seq < next_seq:
                continue
            if known is None or event.worker.incarnation != known.incarnation:
                self.world.feed(event)

    def _kill(self, name: str) -> None:
        if name not in self._removed:
            self.world.kill(name)

    def _remove(self, name: str) -> None:
        """Two at least stay."""
        if self.schedule.fleet.workers - len(self._removed) > 2:
            self._removed.add(name)
            self.world.remove(name)

    def _unheard(self, name: str) -> None:
        """Its events were said not to come, and then to come after all."""
        life = self.world.workers[name].life
        if life is not None:
            self.world.feed(EventsHeard(life.id, "nothing comes"))
            self.world.feed(EventsHeard(life.id, None))

    def _hit_gateway(self, hit: Hit) -> None:
        world = self.world
        match hit.kind:
            case "restart_gateway":
                self._watchman.gateway_restarted()
                world.restart_router()
                for name in self._drained - self._removed:
                    world.drain(name)
            case "close_session":
                world.feed(SessionClosed(f"s{int(hit.amount)}"))
            case "policy":
                world.feed(PolicyChanged(POLICIES[int(hit.amount)]))
            case "rotate_fleet":
                world.feed(EpochRotated(Trigger.TEMPLATE))
            case "rotate_tenant":
                world.feed(EpochRotated(Trigger.TENANT_POLICY, tenant="t1"))
            case "rotate_adapter":
                world.feed(EpochRotated(Trigger.ADAPTER, adapter=ADAPTER))
            case "rotate_revision":
                event = EpochRotated(Trigger.REVISION, keep=("w0",))
                if world.router.left_by(event):
                    world.feed(event)
            case "stale_event":
                kind = (AttemptFailed, RequestFinished, FirstTokenSeen, ReplayArrived, KvBatch)[int(hit.amount * 5)]
                self._say_again(kind, hit.amount)
            case "jump":
                self._watchman.stood_still(hit.amount)
                world.agenda.jump(hit.amount)
            case _:
                raise ValueError(f"no such hit: {hit.kind}")

    def _say_again(self, kind: type[Event], where: float) -> None:
        """An event of that kind that the router has had already comes once more, of what is over."""
        over = [event for event in self._seen if isinstance(event, kind) and self._is_over(event)]
        if over:
            self.world.feed(over[int(where * len(over)) % len(over)])

    def _is_over(self, event: Event) -> bool:
        """Whoever hosts a router does not say of a live request what is not so; of what is over it may come late."""
        if isinstance(event, KvBatch):
            return True
        if isinstance(event, ReplayArrived):
            life = self.world.workers[event.worker.name].life
            return life is None or life.id != event.worker
        ended = {receipt.request_id for receipt in self.world.receipts}
        return getattr(event, "request_id", None) in ended

    # --- and is healed -----------------------------------------------------------------------------------------------

    def _heal(self) -> None:
        self.weather.heal()
        if self._store is not None:
            self._store.heal()
        for name, worker in self.world.workers.items():
            if name in self._removed:
                continue
            self.world.thaw(name)
            if worker.life is None or self.world.router.epochs.is_retired(worker.life.id):
                self.world.restart(name)
            if name in self._drained:
                self.world.resume(name)
        store = self.schedule.fleet.store
        fails = store is not None and store.failure_policy == "fail"  # every request, as long as the store does
        self.world.run(until_s=HEAL_S + (LONG_RECOVERY_S if fails else RECOVERY_S))

    def _quiet_part(self) -> None:
        """New prompts, as many at once as there are workers; then everything may come to rest."""
        world = self.world
        begins_s = world.now_s
        at_once = len(world.workers) - len(self._removed)
        for number in range(BURSTS * at_once):
            self._submit(
                Ask(
                    at_s=begins_s + BURST_EVERY_S * (number // at_once),
                    id=f"after-{number}",
                    root=1000 + number,
                    turns=1,
                    tokens=BURST_TOKENS,
                    max_tokens=1,
                )
            )
        world.run(until_s=begins_s + BURST_EVERY_S * BURSTS + SETTLE_S)
        self._let_everybody_publish()
        world.run(until_s=world.now_s + SETTLE_S)
        if world.unsettled:
            raise Broken(
                f"{world.unsettled} requests have no end {world.now_s - HEAL_S:.0f} s after everything was healed"
            )
        if self._store is not None:
            self._store.is_shared_again(world)
            self._store.comes_to_rest()

    def _let_everybody_publish(self) -> None:
        """The loss of a tail cannot be seen before anything follows, so something follows at every worker."""
        for name, worker in self.world.workers.items():
            if worker.life is not None and worker.life.answers:
                tokens = tokens_of(5000 + int(name[1:]), 1, 3 * BLOCK_TOKENS)
                worker.life.submit(EngineRequest(f"beside/{name}", tokens, 1), _Nobody())

    def _judge(self) -> None:
        world = self.world
        self._watchman.look_at(world.router)
        world.check()
        texts_are_right(world, self.requests, self.schedule.fleet)
        books_are_closed(world)
        everybody_serves(world, self._removed)
        claims_are_true(world, self._asks.values())


def _under_attack(plan: TierPlan, seed: int, kill: Callable[[str], None]) -> StoreUnderAttack:
    """Imported on use: a schedule without a store needs no package for stores."""
    from kvrelay.lab.drills.fuzz.store import StoreUnderAttack

    return StoreUnderAttack(plan, seed=seed, kill=kill)


class _Nobody:
    """Listens to a request that did not come through the gateway."""

    def on_token(self, token_id: int) -> None: ...
    def on_finished(self, finished: object) -> None: ...
    def on_lost(self) -> None: ...
    def on_refused(self) -> None: ...


def play(schedule: Schedule) -> Failure | None:
    return Run(schedule).play()
