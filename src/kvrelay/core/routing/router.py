"""The router: one machine for the live gateway, the simulator and the drills.

`step(now, event)` takes what happened and answers what to do. It reads no clock and draws no chance; the same events
give the same effects, byte for byte. A request lives from `RequestArrived` to exactly one `WriteReceipt`:

    arrived -> decide -> Dispatch -> AttemptAccepted -> FirstTokenSeen -> RequestFinished
                  ^          |
                  +-- retry -+-- AttemptFailed (nothing relayed yet)        ClientLeft at any time
                  +-- migration -- AttemptFailed (a part relayed, and somebody else can continue it)

Every ending goes through `_end`, which takes the load back, lets the in-flight entry go and writes the receipt, so that
none of the three can be forgotten on some path.
"""

from __future__ import annotations

import copy
from itertools import islice

from kvrelay.core.contract.keys import Keyer
from kvrelay.core.index.drift import Outcome
from kvrelay.core.index.in_flight import IN_FLIGHT_RESOLUTION
from kvrelay.core.load.ledger import Ledger
from kvrelay.core.model.effects import (
    BreakOff,
    CancelAttempt,
    Dispatch,
    Effect,
    PassThrough,
    Refuse,
    Report,
    WakeAt,
    WriteReceipt,
)
from kvrelay.core.model.events import (
    AgentHeartbeat,
    AttemptAccepted,
    AttemptFailed,
    CanGoOn,
    ClientLeft,
    DrainStarted,
    EpochRotated,
    Event,
    EventsHeard,
    FirstTokenSeen,
    KvBatch,
    LoadReported,
    PolicyChanged,
    ProbeAnswered,
    RarerEvent,
    ReplayArrived,
    ReplayUnavailable,
    RequestArrived,
    RequestCut,
    RequestFinished,
    ResidencyReset,
    SessionClosed,
    SessionPlaced,
    SettingsChanged,
    SiblingReported,
    SnapshotArrived,
    SnapshotUnavailable,
    WokeUp,
    WorkerDrained,
    WorkerJoined,
    WorkerLeft,
    WorkerResumed,
)
from kvrelay.core.model.ids import SessionKey, TargetId
from kvrelay.core.model.prompt import BlockKeys, Prompt, Usage
from kvrelay.core.model.siblings import Placement, SiblingLoad
from kvrelay.core.model.units import DEADLINE_UNREACHABLE, Fault, RouteReason, Status
from kvrelay.core.policy.cache_load import CacheLoad
from kvrelay.core.policy.policy import Policy
from kvrelay.core.policy.registry import make_policy
from kvrelay.core.receipts.receipt import MAX_CANDIDATES
from kvrelay.core.routing import migration
from kvrelay.core.routing.admission import AdmissionQueue, Futile
from kvrelay.core.routing.affinity import Affinity, Session
from kvrelay.core.routing.alarm import Alarm
from kvrelay.core.routing.assemble import assemble
from kvrelay.core.routing.decider import Decider
from kvrelay.core.routing.describe import answer_match, describe
from kvrelay.core.routing.epochs import Epochs, EpochState
from kvrelay.core.routing.fleet import Candidates, FleetView, Worker
from kvrelay.core.routing.keeper import SWEEP_BLOCKS, Keeper
from kvrelay.core.routing.live import Attempted, Decision, Live
from kvrelay.core.routing.retry import UNTOUCHED, Retry
from kvrelay.core.routing.roster import Effects, Roster
from kvrelay.core.routing.settings import NEVER, RouterSettings
from kvrelay.core.routing.siblings import Siblings
from kvrelay.core.routing.status import MatchAnswer, RouterStatus

_RETRY_HINT_S = 1.0
_LOOK_AHEAD = 64  # waiting requests that are offered a free place per step; more would let a step grow with the queue
_WORKER_LOST = "worker_lost"
_LOST = frozenset({Fault.CONNECT, Fault.TLS, Fault.RESET, Fault.GARBAGE, Fault.NOT_CONTINUED})
_ANSWERED = frozenset({Fault.BACK_PRESSURE, Fault.SERVER_ERROR})  # the worker's own answer is at hand


class Router:
    """Composes fleet, index, load, affinity, policy and retry. Not thread-safe; one host drives it."""

    def __init__(self, settings: RouterSettings, epochs: EpochState = EpochState()) -> None:
        self.settings = settings
        self.epochs = Epochs(epochs)
        self._scorer = settings.scorer
        self.policy = self._make_policy(settings.policy, settings.scorer)
        self._fleet = FleetView(capacity=settings.capacity, place=settings.place, hops=settings.hops)
        self._keeper = Keeper(settings, self._fleet)
        self._ledger = Ledger(initial_prefill_tokens_per_s=settings.initial_prefill_tokens_per_s)
        self._affinity = Affinity(ttl_s=settings.affinity_ttl_s, max_sessions=settings.max_sessions)
        self._retry = Retry(attempts=settings.retry_attempts, budget_ratio=settings.retry_budget_ratio)
        self._waiting = AdmissionQueue(depth=settings.queue_depth, wait_s=settings.queue_wait_s)
        self._decider = Decider(fleet=self._fleet, keeper=self._keeper, ledger=self._ledger)
        self._live: dict[str, Live] = {}
        self._roster = Roster(
            settings,
            epochs=self.epochs,
            fleet=self._fleet,
            keeper=self._keeper,
            ledger=self._ledger,
            affinity=self._affinity,
            live=self._live,
        )
        self._siblings = Siblings(
            has_any=settings.has_siblings, fleet=self._fleet, affinity=self._affinity, ledger=self._ledger
        )
        self._speculative: dict[str, float] = {}  # request -> deadline of its in-flight entry, oldest first
        self._alarm = Alarm()
        self._draining: DrainStarted | None = None
        self.spills = 0
        self.late_events = 0

    # --- questions -----------------------------------------------------------------------------------------------

    @property
    def keyer(self) -> Keyer:
        """Makes the block keys that the index understands."""
        return self._keeper.keyer

    def block_sizes(self) -> tuple[int, ...]:
        """Block sizes in use; a prompt needs keys for each."""
        return self._fleet.block_sizes

    def adapter_of(self, model: str | None) -> str | None:
        """The adapter that this model name means, None for a base model."""
        return self._fleet.adapter_of(model)

    def ready(self, now: float) -> bool:
        """Whether anybody would get a request that came now, as a last resort at least."""
        return self._fleet.anyone(now)

    def match(self, now: float, arrived: RequestArrived) -> MatchAnswer:
        """What would happen to this request. Dispatches nothing and does not take the policy's turn."""
        found = self._fleet.candidates(now, arrived.model, self._ledger, frozenset())
        if found.why_none is not None:
            return answer_match(arrived, None, found.why_none)
        key = _session_key(arrived)
        session = None if key is None else self._affinity.peek(now, key)
        decision = self._decider.decide(now, copy.deepcopy(self.policy), arrived, found.slots, session)
        return answer_match(arrived, decision, decision.choice.reason)

    def status(self, now: float) -> RouterStatus:
        """A snapshot for people and metrics."""
        return describe(
            now,
            policy=self.policy.name,
            needs_match=self.policy.needs_match,
            scorer=self._scorer if isinstance(self.policy, CacheLoad) else None,
            fleet=self._fleet,
            keeper=self._keeper,
            ledger=self._ledger,
            live_requests=len(self._live),
            queue_depth=len(self._waiting),
            sessions=len(self._affinity),
            spills=self.spills,
            late_events=self.late_events,
            epochs=self.epochs.state,
        )

    def next_due(self, now: float) -> float | None:
        """When time alone makes something due here. Until then, or earlier, a `WakeAt` is with the host."""
        if self._keeper.residency.has_retired() or self._keeper.has_backlog():
            return now
        return self._earliest_deadline()

    @property
    def draining(self) -> bool:
        """Whether new requests are refused because the gateway is being shut down."""
        return self._draining is not None

    def sessions(self) -> dict[SessionKey, TargetId]:
        """Session bindings."""
        return self._affinity.homes()

    def has_session(self, now: float, session_id: str, tenant: str | None = None) -> bool:
        """Whether there is anything to close: a binding, or a turn under way that may make one."""
        return any(self._affinity.peek(now, key) is not None for key in self._affinity.named(session_id, tenant))

    def left_by(self, event: EpochRotated) -> tuple[str, ...]:
        """Names of the workers that could still take requests after this rotation."""
        return self._roster.left_by(event)

    def booked_load(self) -> tuple[SiblingLoad, ...]:
        """What siblings are to know of our load; slots without any are left out."""
        return self._siblings.booked_load()

    def placements(self) -> tuple[Placement, ...]:
        """Where all sessions are, for a sibling that is new."""
        return self._siblings.placements()

    # --- the machine ---------------------------------------------------------------------------------------------

    def step(self, now: float, event: Event) -> Effects:
        """Take one event; answer what the host is to do, in order."""
        match event:
            case RequestArrived():
                effects = self._admit(now, event)
            case AttemptAccepted():
                effects = self._accepted(now, event)
            case FirstTokenSeen():
                effects = self._first_token(now, event)
            case RequestFinished():
                effects = self._finished(now, event)
            case _:
                effects = self._handle(now, event)
        return effects + self._serve_waiting(now) if self._waiting.by_id else effects

    def _handle(self, now: float, event: RarerEvent) -> Effects:
        """What does not come with every request."""
        match event:
            case KvBatch():
                return self._kv_batch(now, event)
            case LoadReported():
                return self._unless_late(self._roster.load_reported(event))
            case ProbeAnswered():
                return self._unless_late(self._roster.probed(now, event))
            case AttemptFailed():
                return self._failed(now, event)
            case ClientLeft():
                return self._client_left(now, event)
            case WokeUp():
                return self._woke_up(now)
            case ReplayArrived() | ReplayUnavailable() | SnapshotArrived() | SnapshotUnavailable():
                return self._keeper.answered(now, event) + self._wake(now)
            case AgentHeartbeat():
                return self._keeper.heartbeat(now, event) + self._wake(now)
            case WorkerJoined():
                return self._roster.joined(now, event) + self._wake(now)
            case WorkerLeft():
                self._roster.left(event.name)
                return self._wake(now)
            case WorkerDrained():
                self._roster.set_draining(event.name, True)
                return ()
            case WorkerResumed():
                self._roster.set_draining(event.name, False)
                return ()
            case ResidencyReset():
                return self._unless_late(self._roster.reset(now, event)) + self._wake(now)
            case EventsHeard():
                return self._unless_late(self._roster.events_heard(event))
            case SessionClosed():
                return self._siblings.close_sessions(now, event)
            case PolicyChanged():
                return self._switch_policy(event)
            case RequestCut():
                return self._cut(now, event)
            case SessionPlaced():
                return self._wake(now) if self._siblings.placed(now, event.placement) else ()
            case SiblingReported():
                self._siblings.reported(now, event)
                return ()
            case SettingsChanged():
                return self._change_settings(now, event.settings)
            case EpochRotated():
                return self._roster.rotate(event)
            case DrainStarted():
                self._draining = event
                return ()

    # --- requests ------------------------------------------------------------------------------------------------

    def _admit(self, now: float, arrived: RequestArrived) -> Effects:
        assert arrived.request_id not in self._live, f"{arrived.request_id} is live already"
        live = self._live[arrived.request_id] = Live(arrived, now, self._session_of(now, arrived))
        if self._draining is not None:
            return self._refuse(now, live, "gateway_draining", retry_after_s=self._draining.retry_after_s)
        found = self._fleet.candidates(now, arrived.model, self._ledger, frozenset())
        if found.why_none == "at_capacity" and self._waiting.enabled:
            return self._let_wait(now, live)
        if found.why_none is not None:
            return self._refuse(now, live, found.why_none)
        self._retry.first_attempt()
        return self._dispatch(now, live, found)

    def _session_of(self, now: float, arrived: RequestArrived) -> Session | None:
        """The session that this turn has a part in until its end."""
        key = _session_key(arrived)
        return None if key is None or not self.policy.binds_sessions else self._affinity.enter(now, key)

    def _let_wait(self, now: float, live: Live) -> Effects:
        """Everybody is busy: the request waits for a place, or is told at once that waiting is futile."""
        arrived = live.arrived
        outcome = self._waiting.join(
            now,
            arrived.request_id,
            tenant=arrived.tenant.name,
            priority=arrived.priority,
            until=live.due_at,
        )
        if isinstance(outcome, Futile):
            return self._refuse(now, live, outcome.reason, retry_after_s=outcome.retry_after_s)
        displaced: Effects = ()
        if outcome.displaced is not None:
            gone = self._live[outcome.displaced]
            displaced = self._refuse(now, gone, "queue_displaced", retry_after_s=self._waiting.retry_after_s())
        return displaced + self._wake(now)

    def _serve_waiting(self, now: float) -> Effects:
        """Give free places to those who wait, in turn. A request whose model has no free worker lets others pass."""
        effects: Effects = ()
        full: set[str | None] = set()  # models whose workers are all busy; asked for membership only
        for request_id in tuple(islice(self._waiting.in_turn(), _LOOK_AHEAD)):
            live = self._live[request_id]
            if live.arrived.model in full:
                continue
            found = self._fleet.candidates(now, live.arrived.model, self._ledger, frozenset())
            if found.why_none == "at_capacity":
                full.add(live.arrived.model)
                continue
            self._waiting.served(request_id)
            live.waited_s = now - live.arrived_at
            if found.why_none is not None:
                effects += self._refuse(now, live, found.why_none)
            else:
                self._retry.first_attempt()
                effects += self._dispatch(now, live, found)
        return effects

    def _dispatch(self, now: float, live: Live, found: Candidates, *, continues: bool = False) -> Effects:
        """Decide among the candidates and book the outcome."""
        arrived = live.arrived
        decision = self._decider.decide(now, self.policy, arrived, found.slots, live.session)
        if live.due_at is not None and not continues:
            decided = self._in_time(now, live, live.due_at, decision)
            if not isinstance(decided, Decision):
                return self._refuse(now, live, DEADLINE_UNREACHABLE, retry_after_s=decided)
            decision = decided
        if self._may_not_move(decision) and not continues:
            return self._refuse(now, live, "affinity_hard_unavailable")
        attempted = Attempted(len(live.attempts) + 1, decision, now, found.last_resort, continues)
        live.begin(attempted)
        self._book(now, live, decision)
        worker = self._fleet.worker_at(decision.slot)
        worker.health.dispatched(now, arrived.request_id)
        self._fleet.refusals.dispatched(now, worker.id.name)
        if not worker.health.steady:
            self._fleet.changed()
        if live.session is not None and self.policy.binds_sessions and decision.binds:
            self._affinity.propose(live.session, decision.target, arrived.request_id)
        if decision.choice.spilled_from is not None:
            self.spills += 1
        dispatch = Dispatch(
            request_id=arrived.request_id,
            attempt=attempted.number,
            worker=worker.id,
            rank=decision.target.rank if worker.spec.ranks > 1 else None,
            matched_tokens=decision.claimed_tokens if arrived.prompt.keys else None,
            reason=decision.choice.reason,
            continues=continues,
        )
        effects: Effects = (dispatch, *self._wake_by(self._speculative.get(arrived.request_id)))
        return effects + self._siblings.share(now, live.session) if self.settings.has_siblings else effects

    def _in_time(self, now: float, live: Live, due_at: float, decision: Decision) -> Decision | float:
        """The decision, or if its worker would be late for the request's deadline, another one among those who would
        not; where all would be, how long until somebody might have been in time."""
        left_ms = (due_at - now) * 1000.0
        expected_ms = self._decider.first_token_ms(now, live.arrived, decision)
        if expected_ms[decision.at] <= left_ms:
            return decision
        slots = decision.field.slots
        late = sorted((ms, slot) for ms, slot in zip(expected_ms, slots.tolist(), strict=True) if ms > left_ms)
        for ms, slot in late[:MAX_CANDIDATES]:
            live.over_deadline_ms.setdefault(self._fleet.at(slot).id.worker.name, round(ms, 3))
        in_time = slots[[ms <= left_ms for ms in expected_ms]]
        if not len(in_time):
            return max((min(expected_ms) - left_ms) / 1000.0, _RETRY_HINT_S)
        return self._decider.decide(now, self.policy, live.arrived, in_time, live.session)

    def _may_not_move(self, decision: Decision) -> bool:
        """Under hard affinity a session leaves its worker only if that one is gone for good."""
        broken = decision.field.bound.broken
        return self.settings.affinity_hard and broken not in (None, RouteReason.AFFINITY_BROKEN_LOST)

    def _book(self, now: float, live: Live, decision: Decision) -> None:
        prompt = live.arrived.prompt
        prompt_tokens = (prompt.prompt_tokens or 0) + live.generated_tokens
        block_size = int(self._fleet.block_size_of_slot[decision.slot])
        self._ledger.book(
            now,
            live.arrived.request_id,
            decision.slot,
            prefill_tokens=max(0, prompt_tokens - decision.claimed_tokens),
            decode_blocks=-(-prompt_tokens // block_size) if block_size else 0,
        )
        keys = prompt.keys.get(block_size)
        if keys is not None and self.policy.needs_match:
            self._ledger.growth.placed(
                now,
                decision.slot,
                next(iter(prompt.keys.values())),  # of the one size in which conversations are looked for
                matched_tokens=decision.claimed_tokens,
                prefill_tokens=max(0, prompt_tokens - decision.claimed_tokens),
                continues=decision.continues,
            )
        if keys is not None and _worth_noting(len(keys), decision.claimed_tokens // block_size):
            self._keeper.in_flight.add(live.arrived.request_id, decision.slot, keys)
            self._speculative[live.arrived.request_id] = now + self.settings.speculative_deadline_s

    def _accepted(self, now: float, event: AttemptAccepted) -> Effects:
        live = self._live.get(event.request_id)
        if live is None or live.current is None or live.current.number != event.attempt:
            return self._late()
        live.current.accepted = True
        if live.decision_us is None:
            live.decision_us = event.decision_us
        if live.session is not None:
            self._affinity.confirm(live.session, live.current.decision.target, event.request_id)
        return self._siblings.share(now, live.session)

    def _first_token(self, now: float, event: FirstTokenSeen) -> Effects:
        live = self._live.get(event.request_id)
        if live is None:
            return self._late()
        if live.first_token_at is None:
            live.first_token_at = now
        self._ledger.first_token(now, event.request_id)
        worker = self._worker_of(live)
        if worker is not None:
            worker.health.showed_life(now, event.request_id)
            if worker.health.suspended:
                self._fleet.changed()
        return ()

    def _worker_of(self, live: Live) -> Worker | None:
        """Of the current attempt, if that incarnation is still known."""
        return None if live.current is None else self._fleet.live(live.current.decision.target.worker)

    def _finished(self, now: float, event: RequestFinished) -> Effects:
        live = self._live.get(event.request_id)
        if live is None or live.current is None:
            return self._late()
        live.current.http_status = event.http_status
        if event.given_up:
            return self._given_up(now, live, event)
        worker = self._worker_of(live)
        reports: Effects = ()
        if worker is not None:
            reports = self._roster.report_change(
                worker, worker.health.served(now, event.request_id), "a request ended well"
            )
        if event.http_status < 400:
            self._fleet.refusals.forget(live.current.decision.target.worker.name)
            ended = self._end(now, live, Status.OK, event.http_status, usage=event.usage, itl_ms=event.itl_ms)
            return reports + ended + self._learn_residency(now, live, event.usage)
        reason = f"http_{event.http_status}"
        return reports + self._end(
            now, live, Status.CLIENT_ERROR, event.http_status, failure_reason=reason, usage=event.usage
        )

    def _given_up(self, now: float, live: Live, event: RequestFinished) -> Effects:
        """The client has the worker's own words, to their end, and they say that it failed."""
        assert live.current is not None
        live.current.fault = Fault.SERVER_ERROR
        worker = self._worker_of(live)
        reports: Effects = ()
        if worker is not None:
            change = worker.health.failed(now, event.request_id, Fault.SERVER_ERROR)
            self._fleet.changed()
            reports = self._roster.report_change(worker, change, Fault.SERVER_ERROR.value)
        reason = Fault.SERVER_ERROR.value
        return reports + self._end(
            now,
            live,
            Status.ERROR,
            event.http_status,
            failure_reason=reason,
            usage=event.usage,
            itl_ms=event.itl_ms,
        )

    def _learn_residency(self, now: float, live: Live, usage: Usage) -> Effects:
        """What the engine hit, held against what was claimed: it shows lost events, and mends what was only guessed."""
        assert live.current is not None
        decision = live.current.decision
        target = self._fleet.target(decision.target.worker, decision.target.rank)
        keys = None if target is None else live.arrived.prompt.keys.get(target.block_size_tokens)
        if target is None or keys is None:
            return ()
        size, hit_tokens = target.block_size_tokens, usage.cached_tokens
        if target.approximate is not None:
            actual_blocks = None if hit_tokens is None else hit_tokens // size
            self._keeper.served(now, target, keys, actual_blocks=actual_blocks)
            return self._wake_by(self._keeper.guesses_due)
        if hit_tokens is None or decision.matches is None or _is_batch(live.arrived.prompt, keys, size):
            return ()
        outcome = Outcome(
            routed_at=live.current.started_at,
            finished_at=now,
            keys=keys,
            claimed_blocks=decision.matches.at(decision.slot).fast // size,
            expected_blocks=decision.claimed_tokens // size,
            actual_blocks=hit_tokens // size,
        )
        drifted = self._keeper.compare(now, target, outcome)
        return (*drifted, *self._wake(now)) if drifted else ()

    def _failed(self, now: float, event: AttemptFailed) -> Effects:
        live = self._live.get(event.request_id)
        if live is not None and live.current is None and not event.attempt:
            return self._give_up(now, live, event)  # its time ran out while it waited for a place
        if live is None or live.current is None or live.current.number != event.attempt:
            return self._late()
        attempted = live.current
        attempted.fault, attempted.http_status = event.fault, event.http_status
        attempted.detail = event.detail or None
        lost_with_worker = event.fault is Fault.RESET and self._is_known_lost(attempted, event.request_id)
        reports = self._note_failure(now, attempted, event)
        self._release(now, live)
        if live.session is not None and not event.relayed:
            self._affinity.withdraw(live.session, event.request_id)
        return reports + self._retry_or_end(now, live, event, lost_with_worker=lost_with_worker)

    def _is_known_lost(self, attempted: Attempted, request_id: str) -> bool:
        """Whether its worker had been given up before this attempt broke as well."""
        worker = self._fleet.live(attempted.decision.target.worker)
        return worker is None or worker.health.had_given_up(request_id)

    def _note_failure(self, now: float, attempted: Attempted, event: AttemptFailed) -> Effects:
        worker = self._fleet.live(attempted.decision.target.worker)
        if worker is None:
            return ()
        if event.fault is Fault.BACK_PRESSURE:
            self._fleet.refusals.refused(now, worker.id.name, event.retry_after_s)
        if event.fault is Fault.TOTAL_TIMEOUT:
            change = worker.health.abandoned(now, event.request_id, sent_at=attempted.started_at)
        else:
            change = worker.health.failed(now, event.request_id, event.fault)
        self._fleet.changed()
        return self._roster.report_change(worker, change, event.fault.value)

    def _retry_or_end(self, now: float, live: Live, event: AttemptFailed, *, lost_with_worker: bool) -> Effects:
        tried = frozenset(attempted.decision.target.worker.name for attempted in live.attempts)
        found = self._fleet.candidates(now, live.arrived.model, self._ledger, tried)
        # A worker that is full or cannot be reached has spent nothing on this request: it is no burden to one that can.
        free = event.fault in UNTOUCHED and not found.refusing
        # What broke with its worker is one failure however much it was, and moves once, to those who are well.
        free |= lost_with_worker and not found.last_resort and self.settings.retry_budget_ratio > 0
        hindrance = self._hindrance(now, live, event, free=free) or found.why_none
        if hindrance is not None:
            if not event.relayed:
                live.not_retried_because = hindrance
            elif self.settings.migrate:
                live.not_migrated_because = hindrance
            return self._give_up(now, live, event)
        if not free:
            self._retry.spend()
        if isinstance(event.rest, CanGoOn):
            live.generated_tokens = event.rest.generated_tokens
        return self._dispatch(now, live, found, continues=event.relayed)

    def _hindrance(self, now: float, live: Live, event: AttemptFailed, *, free: bool) -> str | None:
        """Why nobody else may be asked, whoever is there."""
        if event.body_spent:
            return "body_streamed"
        if event.relayed:
            because = migration.hindrance(event) if self.settings.migrate else "migration_off"
            because = because or self._other_epoch(live)
            if because is not None:
                return because
        if self._held_by_session(live):
            return "affinity_hard"
        return self._retry.hindrance(
            now, attempts_made=len(live.attempts), fault=event.fault, relayed=event.relayed, free=free
        )

    def _other_epoch(self, live: Live) -> str | None:
        """What an old worker began, a new one must not end: the answer would be of two revisions."""
        arrived = live.arrived
        same = self.epochs.tag(arrived.tenant.name, arrived.adapter) == arrived.epoch
        return None if same else "epoch_rotated"

    def _held_by_session(self, live: Live) -> bool:
        """Under hard affinity the answer of a session's own worker is final, and passes with its hint."""
        attempted = live.current
        assert attempted is not None
        returned = attempted.decision.choice.reason is RouteReason.STICKY_BOUND
        return self.settings.affinity_hard and returned and live.session is not None and live.session.home is not None

    def _give_up(self, now: float, live: Live, event: AttemptFailed) -> Effects:
        """No further attempt: the client learns what happened, in the form that is still possible."""
        status, reason, http_status = _verdict(event.fault)
        request_id = live.arrived.request_id
        if event.whole:
            return self._end(now, live, status, event.http_status, failure_reason=reason)
        if event.relayed:
            if event.fault in _ANSWERED:  # or so it would have been before the client got a part of it
                status, reason = Status.WORKER_LOST, _WORKER_LOST
            ending: Effect = BreakOff(request_id, status, reason)
            http_status = event.http_status
        elif event.fault in _ANSWERED:
            ending = PassThrough(request_id)
            http_status = event.http_status
        else:
            assert http_status is not None
            ending = Refuse(request_id, http_status, reason, event.retry_after_s or _RETRY_HINT_S)
        return (ending, *self._end(now, live, status, http_status, failure_reason=reason))

    def _refuse(self, now: float, live: Live, reason: str, *, retry_after_s: float = _RETRY_HINT_S) -> Effects:
        """Nobody was asked, or nobody is left to ask."""
        refusal = Refuse(live.arrived.request_id, 503, reason, retry_after_s)
        return (refusal, *self._end(now, live, Status.REFUSED, 503, failure_reason=reason))

    def _client_left(self, now: float, event: ClientLeft) -> Effects:
        live = self._live.get(event.request_id)
        if live is None:
            return self._late()
        cancel = self._cancel_attempt(now, live)
        refused = event.refused_http_status
        status = Status.CLIENT_CANCELLED if refused is None else Status.CLIENT_ERROR
        ended = self._end(now, live, status, refused, failure_reason=event.refused_because, itl_ms=event.itl_ms)
        return cancel + ended

    def _cut(self, now: float, event: RequestCut) -> Effects:
        live = self._live.get(event.request_id)
        if live is None:
            return self._late()
        cancel, ending = self._cancel_attempt(now, live), self._cut_ending(event)
        http_status = event.http_status if event.relayed else 503
        ended = self._end(now, live, Status.ERROR, http_status, failure_reason=event.reason, itl_ms=event.itl_ms)
        return (*cancel, ending, *ended)

    def _cut_ending(self, event: RequestCut) -> Effect:
        if event.relayed:
            return BreakOff(event.request_id, Status.ERROR, event.reason)
        hint_s = _RETRY_HINT_S if self._draining is None else self._draining.retry_after_s
        return Refuse(event.request_id, 503, event.reason, hint_s)

    def _cancel_attempt(self, now: float, live: Live) -> Effects:
        """The worker need not go on. Something is learned of it only if it was silent for long."""
        if live.current is None or live.current.fault is not None:
            return ()
        request_id = live.arrived.request_id
        cancel = CancelAttempt(request_id, live.current.number)
        worker = self._worker_of(live)
        if worker is None:
            return (cancel,)
        change = worker.health.abandoned(now, request_id, sent_at=live.current.started_at)
        if worker.health.suspended:
            self._fleet.changed()
        return (cancel, *self._roster.report_change(worker, change, "its clients leave without having got anything"))

    def _end(
        self,
        now: float,
        live: Live,
        status: Status,
        http_status: int | None,
        *,
        failure_reason: str | None = None,
        usage: Usage = Usage(),
        itl_ms: tuple[float, ...] = (),
    ) -> Effects:
        """The one way out: load back, in-flight entry gone, one receipt."""
        del self._live[live.arrived.request_id]
        self._release(now, live, computed_tokens=_computed_tokens(usage))
        receipt = assemble(
            live,
            now,
            policy=self.policy.name,
            status=status,
            http_status=http_status,
            failure_reason=failure_reason,
            usage=usage,
            itl_ms=itl_ms,
            manifest_digest=self.settings.manifest_digest,
        )
        if live.session is None:
            return (WriteReceipt(receipt),)
        self._affinity.leave(now, live.session, live.arrived.request_id)
        return (WriteReceipt(receipt), *self._wake(now), *self._siblings.share(now, live.session))

    def _release(self, now: float, live: Live, *, computed_tokens: int | None = None) -> None:
        """Take back what the current attempt booked; a second call finds nothing."""
        request_id = live.arrived.request_id
        self._waiting.leave(request_id)
        if self._ledger.settle(now, request_id, computed_tokens=computed_tokens):
            self._waiting.place_freed(now)
        self._keeper.in_flight.discard(request_id)
        self._speculative.pop(request_id, None)

    # --- operator, workers and clock -----------------------------------------------------------------------------

    def _kv_batch(self, now: float, event: KvBatch) -> Effects:
        worker = self._fleet.live(event.worker)
        if worker is not None:
            worker.health.showed_life(now)
        return self._keeper.batch(now, event) + self._wake(now)

    def _switch_policy(self, event: PolicyChanged) -> Effects:
        scorer = event.scorer or self._scorer
        self.policy = self._make_policy(event.policy, scorer)
        self._scorer = scorer
        return (Report("policy_switched", detail=event.policy),)

    def _make_policy(self, name: str, scorer: str) -> Policy:
        """Under hard affinity nothing spills."""
        spill = NEVER if self.settings.affinity_hard else self.settings.spill
        return make_policy(name, scorer, self.settings.weights, spill)

    def _change_settings(self, now: float, settings: RouterSettings) -> Effects:
        old, self.settings = self.settings, settings
        assert settings.key_seed == old.key_seed, "the keys of the index cannot change under it"
        self._affinity.change(ttl_s=settings.affinity_ttl_s)
        self._retry.change(attempts=settings.retry_attempts, budget_ratio=settings.retry_budget_ratio)
        self._fleet.capacity = settings.capacity
        self._waiting.change(depth=settings.queue_depth, wait_s=settings.queue_wait_s)
        self._roster.change(settings)
        if (settings.policy, settings.scorer) != (old.policy, old.scorer):
            return self._switch_policy(PolicyChanged(settings.policy, settings.scorer)) + self._wake(now)
        factors = (settings.weights, settings.spill, settings.affinity_hard)
        if factors != (old.weights, old.spill, old.affinity_hard):
            self.policy = self._make_policy(self.policy.name, self._scorer)
        return self._wake(now)

    def _woke_up(self, now: float) -> Effects:
        self._alarm.rang(now)
        self._keeper.residency.sweep(SWEEP_BLOCKS)
        self._keeper.expire_guesses(now)
        self._affinity.expire(now)
        while self._speculative:
            request_id, deadline = next(iter(self._speculative.items()))
            if deadline > now:
                break
            del self._speculative[request_id]
            self._keeper.in_flight.discard(request_id)
        given_up: Effects = ()
        for request_id in self._waiting.expired(now):
            live, hint_s = self._live[request_id], self._waiting.retry_after_s()
            own = live.due_at is not None and live.due_at <= now
            reason = DEADLINE_UNREACHABLE if own else "queue_wait_over"
            given_up += self._refuse(now, live, reason, retry_after_s=hint_s)
        return given_up + self._keeper.catch_up(now) + self._keeper.give_up_on_answers(now) + self._wake(now)

    def _wake(self, now: float) -> Effects:
        """Ask to be woken for whatever is due next, unless an alarm is set for then or earlier."""
        return self._wake_by(self.next_due(now))

    def _wake_by(self, at: float | None) -> Effects:
        """Where nothing else can have become due earlier."""
        at = self._alarm.set(at)
        return () if at is None else (WakeAt(at),)

    def _earliest_deadline(self) -> float | None:
        """Each of these queues is in order of time, so its head is enough; an alarm for now or sooner needs no look."""
        at = next(iter(self._speculative.values()), None)
        keeper = self._keeper
        others = (
            self._affinity.next_expiry(),
            keeper.next_deadline(),
            keeper.guesses_due,
            self._waiting.next_deadline(),
        )
        for other in others:
            if other is not None and (at is None or other < at):
                at = other
        return at

    def _unless_late(self, effects: Effects | None) -> Effects:
        return self._late() if effects is None else effects

    def _late(self) -> Effects:
        """An event about something that ended before. Counted, never an error: the world is slower than we are."""
        self.late_events += 1
        return ()

    def check(self) -> None:
        """Assert the invariants of every part; for tests and idle moments."""
        self._keeper.residency.check()
        self._keeper.in_flight.check()
        self._ledger.check()
        self._waiting.check()
        self._affinity.check()
        assert all(request_id in self._live for request_id in self._waiting.in_turn()), "somebody waits who is not live"
        booked = sum(1 for live in self._live.values() if live.attempts and live.attempts[-1].fault is None)
        assert len(self._ledger) <= booked, "something is booked that is not live"
        assert set(self._speculative) <= set(self._live), "a speculative entry outlived its request"


def _session_key(arrived: RequestArrived) -> SessionKey | None:
    return None if arrived.session_id is None else SessionKey(arrived.session_id, arrived.tenant.name)


def _is_batch(prompt: Prompt, keys: BlockKeys, block_size_tokens: int) -> bool:
    """Are there more prompts in the request than the one with these keys? Hits are counted over all of them."""
    return prompt.prompt_tokens is None or prompt.prompt_tokens // block_size_tokens > len(keys)


def _computed_tokens(usage: Usage) -> int | None:
    """Of the prompt; None where the engine did not say."""
    if usage.prompt_tokens is None or usage.cached_tokens is None:
        return None
    return usage.prompt_tokens - usage.cached_tokens


def _worth_noting(blocks: int, claimed_blocks: int) -> bool:
    """Does the prefill add more than the resolution of the in-flight index? A next turn on a warm worker does not."""
    return (blocks - claimed_blocks) * IN_FLIGHT_RESOLUTION >= blocks > 0


def _verdict(fault: Fault) -> tuple[Status, str, int | None]:
    """Terminal status, failure reason and the status code for a client that has seen nothing yet."""
    if fault in _LOST:
        return Status.WORKER_LOST, "worker_tls" if fault is Fault.TLS else _WORKER_LOST, 502
    match fault:
        case Fault.BACK_PRESSURE:
            return Status.REFUSED, fault.value, None
        case Fault.SERVER_ERROR:
            return Status.ERROR, fault.value, None
        case _:
            return Status.TIMEOUT, fault.value, 504
