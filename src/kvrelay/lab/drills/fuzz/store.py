"""The store of a fuzzed fleet: what is done to it, and what must hold of it whatever is done.

- nothing is Ready that the engine would not have computed itself: nothing of other weights, of another tenant, epoch or
  adapter, and nothing damaged, cut short or mixed up;
- nothing is announced before it lies there whole;
- a worker reads an object once at a time, and no more objects at once than it may;
- at rest every question to the store has had its answer; healed, what one worker computed the others load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvrelay.core.engine.engine import BlocksLoaded, Finished
from kvrelay.core.engine.sequence import EngineRequest
from kvrelay.core.model.ids import WorkerId
from kvrelay.core.tiers.effects import Fetch, Write
from kvrelay.core.tiers.header import MANIFEST
from kvrelay.core.tiers.manifest import piece_name
from kvrelay.core.tiers.outcome import Outcome
from kvrelay.edge.stores.ciphers import KEY_BYTES
from kvrelay.edge.stores.keys import KeyRing
from kvrelay.edge.stores.object import HEAD_BYTES, Head, check_payload, parse_head
from kvrelay.edge.stores.runtime import Job
from kvrelay.edge.stores.store import Buffer, Store, StoreUnavailable, WriteOutcome
from kvrelay.edge.stores.wrappers import Faulty
from kvrelay.lab.drills.fleets.spoilt import SpoiltStore
from kvrelay.lab.drills.fuzz.invariant import hold
from kvrelay.lab.drills.fuzz.schedule import BLOCK_TOKENS, Hit, TierPlan
from kvrelay.lab.drills.reference import chain_of
from kvrelay.lab.sim.agenda import Action
from kvrelay.lab.sim.store import Place, SharedTiers
from kvrelay.lab.sim.worker import Life
from kvrelay.lab.sim.world import World

REMOTE, LOCAL = "remote", "local"
MAX_FETCHES = 3  # per worker
PROBE_INTERVAL_S = 0.5
ANSWERS_WITHIN_S = 2.0
_SCAN_S = 1.0


class BrittleStore(SpoiltStore):
    """`breaks_writes`: as of `Faulty`, or `unheard` (the object is kept, and the connection breaks before the answer).
    `others` has the names under which something else than the last write lies: what was there before it, or nothing,
    as it was evicted since."""

    def __init__(self) -> None:
        super().__init__()
        self.breaks_writes = "none"
        self.others: set[bytes] = set()

    def write(
        self,
        key: bytes,
        parts: Sequence[Buffer],
        *,
        only_if_absent: bool,
        deadline_s: float,
        ttl_s: float | None = None,
    ) -> WriteOutcome:
        how = "none" if self.breaks_writes == "unheard" else self.breaks_writes
        into: Store = self.inner if how == "none" else Faulty(self.inner, break_writes=how)
        if self.inner.contains([key], deadline_s=deadline_s)[0]:
            self.others.add(key)
        else:
            self.others.discard(key)
        done = into.write(key, parts, only_if_absent=only_if_absent, deadline_s=deadline_s, ttl_s=ttl_s)
        if self.breaks_writes == "unheard":
            raise StoreUnavailable("the connection broke before the answer")
        return done

    def evict(self, every: int) -> None:
        """One object in so many is gone."""
        names = [info.key for info in self.inner.scan(deadline_s=_SCAN_S)]
        self.inner.delete(names[::every], deadline_s=_SCAN_S)
        self.others.update(names[::every])


class StoreUnderAttack:
    """`tiers.connect` is for the world; `kill` ends a worker's process."""

    def __init__(self, plan: TierPlan, *, seed: int, kill: Callable[[str], None]) -> None:
        self._plan = plan
        self._content = BrittleStore()
        self._place = Place(self._content, read_s=plan.read_s)
        self._place.on_job = self._sets_out
        self._kill = kill
        self._doomed: dict[str, float] = {}  # worker -> writes until its end
        self._reading: dict[WorkerId, set[bytes]] = {}  # asked for membership and size only
        places = [None, self._place] if plan.local_bytes else [self._place]
        ring = KeyRing({"k": bytes(KEY_BYTES)} if plan.encrypted else {})
        self.tiers = SharedTiers(self._options(), places, chunk_blocks=plan.chunk_blocks, seed=seed, ring=ring)
        self.tiers.on_loaded = self._is_its_own
        self.tiers.on_announced = self._lies_there_whole

    def _options(self) -> dict[str, Any]:
        plan = self._plan
        remote = {"url": "peer://store.sim:1", "name": REMOTE, "max_fetches": MAX_FETCHES, "write": plan.write}
        local = {"url": "memory://", "name": LOCAL, "bytes": plan.local_bytes}
        return {
            "tiers": [local, remote] if plan.local_bytes else [remote],
            "failure_policy": plan.failure_policy,
            "deadline_ms": plan.deadline_ms,
            "break_even": plan.break_even,
            "probe_interval_s": PROBE_INTERVAL_S,
            "piece_bytes": plan.piece_bytes,
        }

    # --- what goes wrong ---------------------------------------------------------------------------------------------

    def hit(self, hit: Hit) -> None:
        place, content = self._place, self._content
        match hit.kind.removeprefix("store_"):
            case "refuse":
                place.reach = "refuse"
            case "stall":
                place.reach = "stall"
            case "mend":
                place.mend()
            case "slow":
                place.slower_s = hit.amount
            case "truncated" | "damaged" | "phantom" | "foreign" as how:
                content.how, content.damage_at = how, hit.amount
            case "every":
                content.every = int(hit.amount)
            case "whole":
                content.how, content.breaks_writes = None, "none"
            case "partial" | "silent" | "full" | "unheard" as how:
                content.breaks_writes = how
            case "kill":
                self._doomed[f"w{hit.worker}"] = hit.amount
            case "evict":
                content.evict(int(hit.amount))
            case _:
                raise ValueError(f"no such hit: {hit.kind}")

    def heal(self) -> None:
        self._doomed.clear()
        self._place.mend()
        self._content.how, self._content.breaks_writes = None, "none"

    def _sets_out(self, life: Life, job: Job) -> Action | None:
        match job:
            case Fetch():
                return self._reads_once(life, job)
            case Write():
                return self._ends_with_it(life)
            case _:
                return None

    def _ends_with_it(self, life: Life) -> Action | None:
        """The worker dies in the middle of a save: before this write arrives, or (half a write more) right after."""
        name = life.id.name
        left = self._doomed.get(name)
        if left is None:
            return None
        if left >= 1:
            self._doomed[name] = left - 1
            return None
        del self._doomed[name]
        if left:
            return lambda: life.agenda.after(0.0, lambda: self._kill(name))
        return lambda: self._kill(name)

    # --- what must hold ----------------------------------------------------------------------------------------------

    def _is_its_own(self, life: Life, loaded: BlocksLoaded) -> None:
        """The very moment before the engine may use it."""
        own = chain_of(loaded.token_ids, life.engine.settings.model, loaded.adapter, loaded.salt, BLOCK_TOKENS)
        right = loaded.payloads == own[: len(loaded.payloads)]
        hold(right, f"{life.id.name} has {len(loaded.payloads)} blocks ready that are not what it would have computed")

    def _lies_there_whole(self, tier: str, name: bytes, stored_bytes: int) -> None:
        """Unless somebody else left something there before, or took something away since: that is found out by whoever
        reads it."""
        others = self._content.others
        if tier != REMOTE or name in others:
            return
        objects = self._content.inner
        head, fault = _look_at(objects, name)
        if head is not None and head.header.role == MANIFEST:
            pieces = [piece_name(name, number) for number in range(head.header.piece)]
            if not others.isdisjoint(pieces):
                return
            fault = next(filter(None, (_look_at(objects, piece)[1] for piece in pieces)), "")
        hold(not fault, f"an object is announced that does not lie there whole: {fault}")

    def _reads_once(self, life: Life, fetch: Fetch) -> Action:
        if fetch.load is None:  # only to measure
            return lambda: None
        reading = self._reading.setdefault(life.id, set())
        hold(fetch.key not in reading, f"{life.id.name} reads one object twice at once")
        reading.add(fetch.key)
        hold(len(reading) <= MAX_FETCHES, f"{life.id.name} reads {len(reading)} objects at once")
        return lambda: reading.discard(fetch.key)

    def look_at(self) -> None:
        """The invariants of every worker's tiers."""
        for connection in self.tiers.connections.values():
            if not connection.life.ended:
                connection.store.tiers.check()

    def comes_to_rest(self) -> None:
        self.look_at()
        for name, connection in self.tiers.connections.items():
            if connection.life.answers:  # who was removed while it stood still stands still
                owed = connection.store.tiers.under_way
                hold(not owed, f"at rest {name} still waits for {owed} answers of the store")

    def is_shared_again(self, world: World) -> None:
        """What one worker computes now, all others of its kind load, if they are to."""
        plan = self._plan
        if plan.break_even or plan.write != "through":
            return
        tokens = np.arange(_LAST_ROOT, _LAST_ROOT + 2 * plan.chunk_blocks * BLOCK_TOKENS + 1, dtype=np.uint32)
        lives = [worker.life for worker in world.workers.values() if worker.life is not None and worker.life.answers]
        for model in dict.fromkeys(life.engine.settings.model for life in lives):
            alike = [life for life in lives if life.engine.settings.model == model]
            for turn, life in enumerate(alike):
                asked = _Asked()
                life.submit(EngineRequest(f"shared/{life.id.name}", tokens, 1), asked)
                world.run(until_s=world.now_s + ANSWERS_WITHIN_S)
                wanted = len(tokens) - 1 if turn else 0
                hold(
                    asked.cached_tokens is not None and asked.cached_tokens >= wanted,
                    f"healed, and {life.id.name} still loads {asked.cached_tokens} of {wanted} tokens",
                )


_LAST_ROOT = 60_000  # of tokens that no prompt has


class _Asked:
    """Listens to one request that did not come through the gateway."""

    def __init__(self) -> None:
        self.cached_tokens: int | None = None

    def on_token(self, token_id: int) -> None: ...
    def on_lost(self) -> None: ...
    def on_refused(self) -> None: ...

    def on_finished(self, finished: Finished) -> None:
        self.cached_tokens = finished.cached_tokens


def _look_at(objects: Store, name: bytes) -> tuple[Head | None, str]:
    """The head of what lies there, and what is wrong with it."""
    data = objects.read(name, deadline_s=_SCAN_S)
    if data is None:
        return None, "there is none"
    view = memoryview(data).cast("B")
    head = parse_head(view)
    if not isinstance(head, Head):
        return None, head.detail
    verdict = check_payload(head, view[HEAD_BYTES:])
    return head, "" if verdict.outcome is Outcome.HIT else verdict.detail
