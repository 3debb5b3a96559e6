"""A fleet under virtual time: workers that prefill one prompt after the other and keep everything they computed."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

import numpy as np

from kvrelay.core.model.events import FirstTokenSeen, RequestFinished
from kvrelay.core.model.prompt import Usage
from tests.core.routing.rig import SIZE, Rig

PREFILL_TOKENS_PER_S = 8_000.0
DECODE_S = 0.1


class VirtualFleet:
    """Runs requests in a closed loop of a given width; answers who served what."""

    def __init__(self, rig: Rig, names: str) -> None:
        self.rig = rig
        self.cached: dict[str, set[int]] = {name: set() for name in names}
        self._free_at = dict.fromkeys(names, 0.0)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._ids = iter(range(10**9))
        self._running = 0

    def run(self, requests: Iterator[tuple[str, np.ndarray]], *, in_flight: int) -> Iterator[tuple[str, str]]:
        """Yields (session, worker) in order of dispatch. A session's next turn waits until its last one ended."""
        busy: set[str] = set()
        waiting = list(requests)
        while waiting or self._due:
            ready = next((i for i, (session, _) in enumerate(waiting) if session not in busy), None)
            if ready is None or self._running >= in_flight:
                self._advance()
                continue
            session, tokens = waiting.pop(ready)
            busy.add(session)
            yield session, self._dispatch(session, tokens, busy)

    def _dispatch(self, session: str, tokens: np.ndarray, busy: set[str]) -> str:
        number = next(self._ids)
        worker = self.rig.ask(tokens, request_id=f"v{number}", session_id=session, draw=number * 7919)
        assert worker is not None
        self._running += 1
        hashes = self.rig.hashes(tokens)
        hit = next((i for i, h in enumerate(hashes) if h not in self.cached[worker]), len(hashes))
        self.cached[worker].update(hashes)
        start = max(self.rig.now, self._free_at[worker])
        self._free_at[worker] = start + (len(tokens) - hit * SIZE) / PREFILL_TOKENS_PER_S
        self._at(self._free_at[worker], lambda: self._first_token(worker, number, tokens))
        self._at(self._free_at[worker] + DECODE_S, lambda: self._end(session, number, hit, busy))
        return worker

    def _first_token(self, worker: str, number: int, tokens: np.ndarray) -> None:
        self.rig.hold(worker, tokens)
        self.rig.step(FirstTokenSeen(f"v{number}"))

    def _end(self, session: str, number: int, hit: int, busy: set[str]) -> None:
        self.rig.step(RequestFinished(f"v{number}", 200, Usage(None, 1, hit * SIZE)))
        self._running -= 1
        busy.discard(session)

    def _at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when, next(self._ids), what))

    def _advance(self) -> None:
        when, _, what = heapq.heappop(self._due)
        self.rig.now = max(self.rig.now, when)
        what()
