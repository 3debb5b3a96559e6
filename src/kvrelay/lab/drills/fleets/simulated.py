"""A fleet under virtual time: the gateway's own router over mock engines, in one process, the same every time.

What the world here has no such thing as (a disk, a process of its own for the gateway) is taken at its nearest: a full
disk is a receipt log whose every write fails, a stalled gateway a clock that jumps ahead.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

from kvrelay.core.engine.cost import StepCost
from kvrelay.core.engine.engine import EngineSettings
from kvrelay.core.engine.scheduler import SchedulerLimits
from kvrelay.core.model.events import EpochRotated, PolicyChanged, RequestArrived, SessionClosed, WorkerSpec
from kvrelay.core.model.prompt import Prompt, Tenant
from kvrelay.core.receipts.receipt import Receipt
from kvrelay.core.routing.settings import RouterSettings
from kvrelay.edge.observe.receipt_log import ReceiptLog, receipt_file
from kvrelay.lab.drills import actions as act
from kvrelay.lab.drills.drill import INTERVAL_S, Drill, Look, Send, Settle, Turn, WorkerPlan
from kvrelay.lab.drills.fleets.base import CannotDo
from kvrelay.lab.drills.fleets.simulated_store import SimulatedStore, StoreAction
from kvrelay.lab.drills.fleets.targets import resolve
from kvrelay.lab.drills.fleets.weather import BrokenWeather
from kvrelay.lab.drills.history import Deed, Held, History, Outcome, Settled, View, WorkerView
from kvrelay.lab.drills.prompts import Text
from kvrelay.lab.drills.reference import MODEL, right_text, salt_of, tenant_salt, weights
from kvrelay.lab.sim.attempt import HostTimes, SimRequest
from kvrelay.lab.sim.worker import WorkerSetup
from kvrelay.lab.sim.world import World

POLL_S = 0.02
FULL_DISK = Path("/dev/full")
REPLAY_TIMEOUT_S = 1.0
_ENDINGS = {"end": "ok", "refused": "refused", "passed_through": "refused", "broken_off": "broken", "left": "left"}


class SimulatedFleet:
    """`world` may be looked at, by a fuzzer that checks its invariants at every step."""

    kind = "simulated"

    def __init__(self, drill: Drill, *, seed: int = 1) -> None:
        setup = self._setup = drill.setup
        self.history = History(drill=drill.name, fleet=self.kind, retry_attempts=setup.retry_attempts)
        self.weather = BrokenWeather()
        self._plans = {plan.name: plan for plan in setup.workers}
        self._turns: dict[str, Turn] = {}
        self._store: SimulatedStore | None = None
        if setup.store is not None:
            self._store = SimulatedStore(setup.store, seed=seed)
        self.world = World(
            [self._worker(plan) for plan in setup.workers],
            settings=RouterSettings(
                policy=setup.policy,
                affinity_ttl_s=setup.affinity_ttl_s,
                retry_attempts=setup.retry_attempts,
                retry_budget_ratio=setup.retry_budget_ratio,
                queue_depth=setup.queue_depth,
                queue_wait_s=setup.queue_wait_s,
                replay_timeout_s=REPLAY_TIMEOUT_S,
                key_seed=b"drill",
            ),
            seed=seed,
            weather=self.weather,
            times=HostTimes(first_byte_s=setup.first_byte_s, idle_s=setup.idle_s),
            interval_s=INTERVAL_S,
            connect=None if self._store is None else self._store.tiers.connect,
        )
        self._log = ReceiptLog(receipt_file(FULL_DISK, rotate_mb=1, keep=1)) if setup.receipts_on_full_disk else None
        self._logged = 0

    async def __aenter__(self) -> Self:
        self.world.run(until_s=2 * INTERVAL_S)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._log is not None:
            self._log.close()

    def _worker(self, plan: WorkerPlan) -> WorkerSetup:
        engine = EngineSettings(
            model=weights(plan.revision),
            blocks=plan.blocks,
            max_model_len=min(8192, plan.blocks * 16),
            limits=SchedulerLimits(max_num_seqs=plan.max_num_seqs),
            cost=StepCost(prefill_tokens_per_s=self._setup.prefill_tokens_per_s, decode_ms=self._setup.decode_ms),
        )
        spec = WorkerSpec(
            url=f"http://{plan.name}.sim",
            models=(MODEL,),
            adapters=plan.adapters,
            block_size_tokens=engine.block_size_tokens,
            max_active_requests=plan.max_active_requests or None,
            engine="mock",
            models_payload=False,
        )
        return WorkerSetup(name=plan.name, engine=engine, spec=spec)

    # --- requests ----------------------------------------------------------------------------------------------------

    async def send(self, number: int, step: Send) -> None:
        world, begins_s = self.world, self.world.now_s
        for at_s, action in step.blows:
            world.at(begins_s + at_s, lambda action=action: self._act(action))  # type: ignore[misc]
        for turn in step.turns:
            self._turns[turn.id] = turn
            due_s = begins_s + turn.at_s
            world.submit(due_s, self._request(turn))
            if turn.leaves_after_s is not None:
                world.leave(due_s + turn.leaves_after_s, turn.id)
        world.run()
        world.run(until_s=max(world.now_s, begins_s + max((at_s for at_s, _ in step.blows), default=0.0)))
        self._note(number, begins_s, step.turns)

    def _request(self, turn: Turn) -> SimRequest:
        return SimRequest(
            request_id=turn.id,
            token_ids=turn.text.token_ids(),
            max_tokens=turn.max_tokens,
            session_id=turn.session,
            model=turn.adapter or MODEL,
            adapter=turn.adapter,
            tenant=Tenant() if turn.tenant is None else Tenant(turn.tenant, salt=tenant_salt(turn.tenant)),
        )

    def _note(self, number: int, begins_s: float, turns: tuple[Turn, ...]) -> None:
        receipts: dict[str, list[Receipt]] = {}
        for receipt in self.world.receipts:
            receipts.setdefault(receipt.request_id, []).append(receipt)
        for turn in turns:
            self.history.outcomes.append(self._outcome(number, begins_s, turn, receipts.get(turn.id, [])))
        self._log_receipts()

    def _outcome(self, number: int, begins_s: float, turn: Turn, receipts: list[Receipt]) -> Outcome:
        answer, receipt = self.world.answers[turn.id], receipts[-1] if receipts else None
        due_s = begins_s + turn.at_s
        ending = _ENDINGS.get(answer.ending or "", answer.ending or "none")
        if receipt is not None and ending == "ok" and receipt.http_status != 200:
            ending = "refused"  # the worker's own 4xx
        return Outcome(
            id=turn.id,
            session=turn.session,
            tenant=turn.tenant,
            step=number,
            prompt_tokens=turn.text.tokens,
            at_s=due_s,
            sent_s=due_s,
            ended_s=None if receipt is None or receipt.e2e_ms is None else due_s + receipt.e2e_ms / 1000,
            ending=ending,  # type: ignore[arg-type]
            http_status=None if receipt is None else receipt.http_status,
            ttft_ms=None if receipt is None else receipt.ttft_ms,
            text=bytes(answer.token_ids).decode("latin-1"),
            texts=self._right_texts(turn, receipt),
            worker=None if receipt is None else receipt.chosen_worker,
            life=None if receipt is None else receipt.incarnation,
            cached_tokens=None if receipt is None else receipt.actual_cached_tokens,
            receipt=receipt,
            receipts=len(receipts),
        )

    def _right_texts(self, turn: Turn, receipt: Receipt | None) -> dict[str, str]:
        salt = salt_of(None if receipt is None else receipt.epoch, turn.tenant)
        revisions = dict.fromkeys(plan.revision for plan in self._plans.values())
        return {
            revision: right_text(turn.text, turn.max_tokens, revision, turn.adapter, salt) for revision in revisions
        }

    def _log_receipts(self) -> None:
        if self._log is None:
            return
        for receipt in self.world.receipts[self._logged :]:
            self._log.write(receipt)
        self._logged = len(self.world.receipts)
        self._log.flush()
        self.history.receipts_dropped = self._log.dropped
        self.history.notes["receipts_at_hand"] = len(self._log.recent(1000))

    # --- what is done ------------------------------------------------------------------------------------------------

    async def do(self, action: act.Action) -> None:
        self._act(action)

    def _act(self, action: act.Action) -> None:
        name = self._named(action)
        worker = self.world.workers.get(name or "")
        self.history.deeds.append(
            Deed(
                at_s=self.world.now_s,
                done_s=self.world.now_s,
                action=str(action),
                kind=type(action).__name__,
                worker=name,
                life=None if worker is None or worker.life is None else worker.life.id.incarnation,
            )
        )
        if name is None:
            self._do_to_gateway(action)
        else:
            self._do_to_worker(action, name)

    def _named(self, action: act.Action) -> str | None:
        served = [(receipt.session_id, receipt.chosen_worker) for receipt in self.world.receipts]
        return resolve(action.target, served, self.history.deeds)

    def _do_to_worker(self, action: act.Action, name: str) -> None:
        world, weather = self.world, self.weather
        match action:
            case act.Kill():
                world.kill(name)
            case act.Terminate():
                self._terminate(name)
            case act.Start():
                world.restart(name)
                weather.refusals.pop(name, None)
            case act.Freeze():
                world.freeze(name)
            case act.Thaw():
                world.thaw(name)
            case act.AddWorker():
                plan = WorkerPlan(name=name, revision=action.revision)
                self._plans[name] = plan
                world.add(self._worker(plan))
            case act.RemoveWorker():
                world.remove(name)
            case act.Refuse():
                weather.refusals[name] = action.http_status, action.count
            case act.Partition():
                weather.cut_off.add(name)
                world.freeze(name)  # what is under way reaches nobody, and comes when the network is back
            case act.Slow():
                weather.slower_s[name] = action.delay_s
            case act.MendNetwork():
                weather.slower_s.pop(name, None)
                if name in weather.cut_off:
                    weather.cut_off.discard(name)
                    world.thaw(name)
            case act.LoseEvents():
                weather.lost_batches[name] = action.batches
            case act.DoubleEvents():
                weather.doubled.add(name)
            case act.ShuffleEvents():
                weather.shuffled.add(name)
            case act.SilenceReplay():
                weather.no_replay.add(name)
            case act.MendEvents():
                weather.lost_batches.pop(name, None)
                for broken in (weather.doubled, weather.shuffled, weather.no_replay):
                    broken.discard(name)
            case _:
                raise CannotDo(f"a simulated fleet cannot do `{action}`")

    def _terminate(self, name: str) -> None:
        """It refuses what is new and ends with its last request."""
        self.weather.refusals[name] = 503, 2**31
        self._end_when_idle(name)

    def _end_when_idle(self, name: str) -> None:
        life = self.world.workers[name].life
        if life is None or not life.engine.unfinished_requests:
            self.world.kill(name)
        else:
            self.world.at(self.world.now_s + POLL_S, lambda: self._end_when_idle(name))

    def _do_to_gateway(self, action: act.Action) -> None:
        world = self.world
        match action:
            case act.StoreDown() | act.StoreUp() | act.SpoilStore() | act.WipeStore() | act.CountReads():
                self._strike_store(action)
            case act.RestartGateway():
                world.restart_router()
            case act.Pause():
                world.agenda.jump(action.seconds)
            case act.SetPolicy():
                world.feed(PolicyChanged(action.policy))
            case act.Rollback():
                world.feed(PolicyChanged("round_robin"))
                if self._store is not None:
                    self._store.leave_alone()
            case act.CloseSession():
                world.feed(SessionClosed(action.session))
            case act.Rotate():
                world.feed(EpochRotated(action.trigger, action.tenant, action.adapter, action.keep))
            case act.ForgetCaches():
                for name in world.workers:
                    if not world.reset_cache(name):
                        raise CannotDo(f"{name} kept its cache: requests hold blocks")
            case _:
                raise CannotDo(f"a simulated fleet cannot do `{action}`")

    def _strike_store(self, action: StoreAction) -> None:
        if self._store is None:
            raise CannotDo("this drill's workers share no store")
        self._store.strike(action)

    # --- time and sight ----------------------------------------------------------------------------------------------

    async def wait(self, seconds: float) -> None:
        self.world.run(until_s=self.world.now_s + seconds)

    async def settle(self, step: Settle) -> None:
        wanted = step.workers or tuple(name for name, worker in self.world.workers.items() if worker.life is not None)
        began_s = self.world.now_s
        while self.world.now_s < began_s + step.within_s:
            if self._usable(wanted):
                self.history.settled.append(Settled(self.world.now_s - began_s, wanted))
                return
            self.world.run(until_s=self.world.now_s + POLL_S)
        self.history.settled.append(Settled(None, wanted))

    def _usable(self, wanted: tuple[str, ...]) -> bool:
        known = {worker.name: worker for worker in self.world.router.status(self.world.now_s).workers}
        for name in wanted:
            life = self.world.workers[name].life
            seen = known.get(name)
            if life is None or seen is None or not seen.routable or seen.incarnation != life.id.incarnation:
                return False
        return True

    async def look(self, step: Look) -> None:
        world = self.world
        status = world.router.status(world.now_s)
        held = [each for number, text in enumerate(step.texts) for each in self._held(number, text)]
        self.history.views.append(
            View(
                label=step.label,
                at_s=world.now_s,
                workers=tuple(
                    WorkerView(
                        name=worker.name,
                        life=worker.incarnation,
                        routable=worker.routable,
                        index_state=worker.targets[0].index_state.value,
                        index_blocks=sum(worker.targets[0].index_blocks.values()),
                        active_requests=worker.targets[0].active_requests,
                        next_event_seq=worker.targets[0].next_event_seq,
                    )
                    for worker in status.workers
                ),
                live_requests=status.live_requests,
                index_blocks=status.index_blocks,
                held=tuple(held),
                policy=status.policy,
                store=None if self._store is None else self._store.content.figures(),
                reports=dict(world.reports),
            )
        )

    def _held(self, number: int, text: Text) -> list[Held]:
        world, token_ids = self.world, text.token_ids()
        salt = salt_of(world.router.epochs.tag("default", None))
        keys = {size: world.router.keyer.prompt_keys(token_ids, size, salt=salt) for size in world.router.block_sizes()}
        arrived = RequestArrived("look", Prompt(len(token_ids), keys))
        claims = {each.worker: each.tiers.get("gpu", 0) for each in world.router.match(world.now_s, arrived).candidates}
        size = self.history.block_size_tokens
        return [
            Held(
                text=number,
                worker=name,
                claimed=claims.get(name),
                real=None if worker.life is None else world.cached_blocks(name, token_ids, salt=salt) * size,
            )
            for name, worker in world.workers.items()
        ]
