"""Requests that wait for a free place: bounded, by priority, fair between tenants, refused early if waiting is futile.

Order: higher priority first; within a priority the tenants take turns, so that one tenant's burst does not push back
another's single request; within a tenant first come, first served. When the queue is full, a request of higher priority
takes the place of the newest of the lowest one. The expected wait is the number of requests ahead times the mean time
between two places becoming free; who would wait longer than allowed is told so at once, with the time after which
trying again makes sense. A request with a deadline of its own is allowed no more than that.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from msgspec import Struct
from msgspec.structs import replace

from kvrelay.core.model.units import DEADLINE_UNREACHABLE

_DECAY = 0.9
_SHORTEST_HINT_S, _LONGEST_HINT_S = 1.0, 60.0


class Waiting(Struct, frozen=True):
    """One request in the queue."""

    request_id: str
    tenant: str
    priority: int
    deadline: float
    is_own: bool  # its own, and not that of all who came when it came


class Queued(Struct, frozen=True):
    """The request waits now; `displaced` had to give way and is to be refused."""

    displaced: str | None = None


class Futile(Struct, frozen=True):
    """The request was not taken."""

    reason: str  # queue_full | queue_too_slow | deadline_unreachable
    retry_after_s: float


class AdmissionQueue:
    """Who waits, in which order they are served, and for how long."""

    def __init__(self, *, depth: int, wait_s: float) -> None:
        self._depth = depth
        self._wait_s = wait_s
        self._lanes: dict[
            int, dict[str, dict[str, Waiting]]
        ] = {}  # priority -> tenant (next in turn first) -> requests
        self.by_id: dict[str, Waiting] = {}
        """Who waits; to be looked at."""
        self._deadlines: list[tuple[float, str]] = []  # a heap; of those who have left, until they come to its top
        self._freed_at: float | None = None
        self._between_s: float | None = None

    def __len__(self) -> int:
        return len(self.by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.by_id

    @property
    def enabled(self) -> bool:
        return self._depth > 0

    def change(self, *, depth: int, wait_s: float) -> None:
        """New bounds. Who waits stays, even if more do than may from now on, and waits as long as the others."""
        for waiting in tuple(self.by_id.values()):
            if not waiting.is_own:
                waits = replace(waiting, deadline=waiting.deadline - self._wait_s + wait_s)
                self.by_id[waiting.request_id] = waits
                self._lanes[waiting.priority][waiting.tenant][waiting.request_id] = waits
        self._depth, self._wait_s = depth, wait_s
        self._deadlines = [(waiting.deadline, request_id) for request_id, waiting in self.by_id.items()]
        heapify(self._deadlines)

    def join(
        self, now: float, request_id: str, *, tenant: str, priority: int, until: float | None = None
    ) -> Queued | Futile:
        """Take the request in, or say why not and when to come back. `until`: later a place is of no use to it."""
        allowed = now + self._wait_s
        deadline = allowed if until is None else min(allowed, until)
        is_own, wait_s = deadline < allowed, deadline - now
        ahead = sum(1 for waiting in self.by_id.values() if waiting.priority >= priority)
        if wait_s <= 0 or (self._between_s is not None and ahead * self._between_s > wait_s):
            return Futile(DEADLINE_UNREACHABLE if is_own else "queue_too_slow", self._hint_s(ahead))
        displaced = None
        if len(self.by_id) >= self._depth:
            displaced = self._least_urgent(below=priority)
            if displaced is None:
                return Futile("queue_full", self._hint_s(ahead))
            self.leave(displaced)
        waiting = Waiting(request_id, tenant, priority, deadline, is_own)
        self.by_id[request_id] = waiting
        heappush(self._deadlines, (waiting.deadline, request_id))
        self._lanes.setdefault(priority, {}).setdefault(tenant, {})[request_id] = waiting
        return Queued(displaced)

    def leave(self, request_id: str) -> bool:
        """The request no longer waits, for whatever reason; False if it did not."""
        waiting = self.by_id.pop(request_id, None)
        if waiting is None:
            return False
        tenants = self._lanes[waiting.priority]
        requests = tenants[waiting.tenant]
        del requests[request_id]
        if not requests:
            del tenants[waiting.tenant]
            if not tenants:
                del self._lanes[waiting.priority]
        return True

    def served(self, request_id: str) -> None:
        """The request got its place: it leaves, and its tenant's next one queues up behind the other tenants."""
        waiting = self.by_id[request_id]
        self.leave(request_id)
        tenants = self._lanes.get(waiting.priority, {})
        if waiting.tenant in tenants:
            tenants[waiting.tenant] = tenants.pop(waiting.tenant)

    def in_turn(self) -> Iterator[str]:
        """Request ids in the order in which they would be served if each tenant had its turn now."""
        for priority in sorted(self._lanes, reverse=True):
            lanes = [iter(requests) for requests in self._lanes[priority].values()]
            while lanes:
                for lane in list(lanes):
                    request_id = next(lane, None)
                    if request_id is None:
                        lanes.remove(lane)
                    else:
                        yield request_id

    def expired(self, now: float) -> list[str]:
        """Who waited as long as is allowed and is to leave now, the one whose time ended first before the others."""
        due = []
        while (at := self.next_deadline()) is not None and at <= now:
            due.append(heappop(self._deadlines)[1])
        return due

    def next_deadline(self) -> float | None:
        while self._deadlines and not self._stands(*self._deadlines[0]):
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _stands(self, deadline: float, request_id: str) -> bool:
        """Also an id that came back has a deadline of its own."""
        waiting = self.by_id.get(request_id)
        return waiting is not None and waiting.deadline == deadline

    def place_freed(self, now: float) -> None:
        """A request ended somewhere; the pace at which this happens is what waiting times are foretold from.

        Only the time after which somebody waited counts: all places were taken then. How far apart requests end on an
        idle fleet is the pace of its clients, and would have the first burst after a quiet hour refused as futile.
        """
        if self._freed_at is not None:
            between_s = now - self._freed_at
            known = self._between_s
            self._between_s = between_s if known is None else known * _DECAY + between_s * (1 - _DECAY)
        self._freed_at = now if self.by_id else None

    def retry_after_s(self) -> float:
        """When a request that comes now would probably find the queue worked off."""
        return self._hint_s(len(self.by_id))

    def _hint_s(self, ahead: int) -> float:
        expected_s = _SHORTEST_HINT_S if self._between_s is None else ahead * self._between_s
        return min(max(expected_s, _SHORTEST_HINT_S), _LONGEST_HINT_S)

    def _least_urgent(self, *, below: int) -> str | None:
        lowest = min(self._lanes)
        if lowest >= below:
            return None
        return next(r for r, waiting in reversed(self.by_id.items()) if waiting.priority == lowest)

    def check(self) -> None:
        """Assert that lanes and table agree."""
        in_lanes = [r for tenants in self._lanes.values() for requests in tenants.values() for r in requests]
        assert sorted(in_lanes) == sorted(self.by_id)
        assert all(requests for tenants in self._lanes.values() for requests in tenants.values())
        assert sorted(self.in_turn()) == sorted(self.by_id)
        standing = {request_id for at, request_id in self._deadlines if self._stands(at, request_id)}
        assert standing == set(self.by_id), "somebody waits without end"
