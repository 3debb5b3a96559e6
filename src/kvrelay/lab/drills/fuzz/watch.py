"""Invariants of a fuzzed fleet, looked at after every step of the router. Sees events and effects, not the breaker.

- a request gets exactly one receipt, and nothing is asked for it after that;
- attempts count up from 1 to the limit, never twice on one worker, and never anew after the first token was relayed,
  unless the attempt continues the stream;
- a claim is never invented: whatever the router believes to lie on a life of a worker was published by that very life,
  under the same tenant, adapter and epoch; after a reset through the gateway nothing is;
- nobody is sent to a worker that is drained, or of a past epoch;
- nobody waits for a place beyond the limit, and whatever is due next has its wake-up (`clocks.py`);
- a worker is called down for what speaks against it, never for being full (`standing.py`);
- what grows has its bound, and time goes on.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvrelay.core.contract.keys import Keyer
from kvrelay.core.model.effects import BreakOff, Dispatch, Effect, PassThrough, Refuse, Report, WriteReceipt
from kvrelay.core.model.events import (
    Event,
    FirstTokenSeen,
    RequestArrived,
    ResidencyReset,
    WorkerDrained,
    WorkerJoined,
    WorkerLeft,
    WorkerResumed,
)
from kvrelay.core.model.ids import WorkerId
from kvrelay.core.model.units import DEADLINE_UNREACHABLE
from kvrelay.core.receipts.receipt import Receipt
from kvrelay.core.routing.router import Router
from kvrelay.lab.drills.fuzz.clocks import Clocks
from kvrelay.lab.drills.fuzz.invariant import hold
from kvrelay.lab.drills.fuzz.schedule import BLOCK_TOKENS
from kvrelay.lab.drills.fuzz.standing import Standing
from kvrelay.lab.sim.attempt import SimRequest

CHECK_EVERY = 40  # steps between two looks at all of the router's own invariants
MAX_STEPS_AT_ONCE = 5_000
MAX_PENDING_BATCHES, MAX_SESSIONS = 64, 6

_engine_keyer = Keyer(b"0")


class Watchman:
    """One run's observer; `requests` and `published` are filled by others while it runs."""

    def __init__(
        self,
        *,
        attempts: int,
        queue_wait_s: float,
        max_orphans: int,
        requests: Mapping[str, SimRequest],
        published: Mapping[WorkerId, set[int]],
    ) -> None:
        self.steps = 0
        self._attempts = attempts
        self._longest_wait_s = queue_wait_s
        self._max_orphans = max_orphans
        self._requests = requests
        self._published = published
        self._tried: dict[str, list[str]] = {}
        self._clocks = Clocks(longest_wait_s=queue_wait_s)
        self._standing = Standing(self._tried)
        self._begun: set[str] = set()
        self._ended: set[str] = set()
        self._open: set[str] = set()
        self._salts: dict[str, str | None] = {}
        self._due_s: dict[str, float] = {}  # of those with a deadline for their first token
        self._drained: set[str] = set()
        self._retired: set[str] = set()
        self._now_s, self._steps_now = 0.0, 0

    def stood_still(self, for_s: float) -> None:
        """The gateway, so nobody's waiting could be ended in that time."""
        self._longest_wait_s += for_s
        self._clocks.stood_still(for_s)

    def gateway_restarted(self) -> None:
        """What was open is cut, and its ids mean nothing any more. Orders of operators go with the process."""
        self._drained.clear()
        self._ended |= self._open
        self._open.clear()
        self._clocks.gateway_restarted()

    def after(self, now_s: float, router: Router, event: Event, effects: tuple[Effect, ...]) -> None:
        self.steps += 1
        self._steps_now = self._steps_now + 1 if now_s == self._now_s else 0
        self._now_s = now_s
        hold(self._steps_now < MAX_STEPS_AT_ONCE, f"{self._steps_now} steps, and no time passes")
        self._clocks.after(now_s, event, effects, router.next_due(now_s))
        self._standing.after(event, effects)
        self._note_orders(event)
        if isinstance(event, RequestArrived):
            self._open.add(event.request_id)
            self._salts[event.request_id] = event.tenant.salt
            if event.deadline_ms is not None:
                self._due_s[event.request_id] = now_s + event.deadline_ms / 1000
        for effect in effects:
            match effect:
                case Dispatch():
                    self._dispatched(effect)
                case Report(kind="worker_retired", worker=name) if name is not None:
                    self._retired.add(name)
                case WriteReceipt():
                    self._ended_with(effect.receipt)
                case Refuse() | PassThrough() | BreakOff():
                    self._must_be_open(effect.request_id, type(effect).__name__)
                case _:
                    pass
        if isinstance(event, ResidencyReset) and not event.replay:
            self._is_empty(router, event.name)
        if isinstance(event, FirstTokenSeen) and event.request_id in self._open:
            self._begun.add(event.request_id)
        if self.steps % CHECK_EVERY == 0:
            self.look_at(router)

    def _note_orders(self, event: Event) -> None:
        match event:
            case WorkerDrained(name):
                self._drained.add(name)
            case WorkerResumed(name) | WorkerLeft(name):
                self._drained.discard(name)
            case WorkerJoined(worker):
                self._retired.discard(worker.name)
            case _:
                pass

    def _is_empty(self, router: Router, name: str) -> None:
        """Who resets a cache through us may rely on it at once, not when the worker's own event comes."""
        for worker in router.status(self._now_s).workers:
            blocks = sum(worker.targets[0].index_blocks.values()) if worker.name == name else 0
            hold(not blocks, f"{blocks} blocks of {name} are believed right after its cache was reset")

    def look_at(self, router: Router) -> None:
        """All of the router's own invariants, and its bounds."""
        router.check()
        status = router.status(0.0)
        hold(status.live_requests == len(self._open), f"{status.live_requests} live, {len(self._open)} open")
        hold(status.sessions <= MAX_SESSIONS, f"{status.sessions} sessions")
        for worker in status.workers:
            for target in worker.targets:
                hold(target.orphan_blocks <= self._max_orphans, f"{target.orphan_blocks} orphans of {worker.name}")

    def _must_be_open(self, request_id: str, what: str) -> None:
        hold(request_id in self._open, f"{what} for {request_id}, which has ended")

    def _dispatched(self, effect: Dispatch) -> None:
        request_id = effect.request_id
        self._must_be_open(request_id, "Dispatch")
        tried = self._tried.setdefault(request_id, [])
        hold(effect.attempt == len(tried) + 1, f"{request_id}: attempt {effect.attempt} after {len(tried)}")
        hold(effect.attempt <= self._attempts, f"{request_id}: attempt {effect.attempt} of {self._attempts}")
        hold(effect.worker.name not in tried, f"{request_id}: {effect.worker.name} is tried again")
        tried.append(effect.worker.name)
        hold(effect.worker.name not in self._drained, f"{request_id} is sent to {effect.worker.name}, which is drained")
        hold(effect.worker.name not in self._retired, f"{request_id} is sent to {effect.worker.name} of a past epoch")
        due_s = self._due_s.get(request_id)
        if due_s is not None and not effect.continues:
            hold(self._now_s <= due_s, f"{request_id} is sent {self._now_s - due_s:.3f} s after its deadline")
        if request_id in self._begun:
            hold(effect.continues, f"{request_id} is sent again after its first token was relayed")

    def _ended_with(self, receipt: Receipt) -> None:
        request_id = receipt.request_id
        hold(request_id not in self._ended, f"a second receipt of {request_id}")
        hold(request_id in self._open, f"a receipt of {request_id}, which never arrived")
        self._open.discard(request_id)
        self._ended.add(request_id)
        waited_ms = receipt.router_queue_ms or 0.0
        hold(waited_ms <= self._longest_wait_s * 1000 + 1, f"{request_id} waited {waited_ms:.0f} ms for a place")
        if receipt.failure_reason == DEADLINE_UNREACHABLE:
            hold(request_id in self._due_s, f"{request_id} is refused for a deadline that it does not have")
            hold(request_id not in self._begun, f"{request_id} is refused for a deadline after its first token")
        self._claim_was_published(receipt)

    def _claim_was_published(self, receipt: Receipt) -> None:
        """The claim was made before, so what was published by now is an upper bound of what it may be."""
        for candidate in receipt.candidates:
            claimed_tokens = candidate.matched_tokens.get("gpu", 0)
            if not claimed_tokens:
                continue
            life = WorkerId(candidate.worker, candidate.incarnation)
            names = self._names(receipt.request_id)[: claimed_tokens // BLOCK_TOKENS]
            known = self._published.get(life, set())
            depth = next((at for at, name in enumerate(names) if name not in known), len(names))
            hold(
                depth == len(names),
                f"{receipt.request_id}: {len(names)} blocks claimed on {life}, which has published {depth} of them",
            )

    def _names(self, request_id: str) -> list[int]:
        request = self._requests[request_id]
        names: list[int] = _engine_keyer.prompt_keys(
            np.asarray(request.token_ids, dtype=np.uint32),
            BLOCK_TOKENS,
            adapter=request.adapter,
            salt=self._salts[request_id],
        ).tolist()
        return names
