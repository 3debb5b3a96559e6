"""Claims against outcomes, per worker rank: has a loss made the index wrong that no sequence number can show?

A lost event leaves a gap only if another one follows. The loss of the last one shows in nothing but this: the engine
hits more than was claimed (a stored event was lost: `under_claim`) or less (a removal was lost: `over_claim`).

One finished request proves nothing by itself, because the world goes on between routing and prefill. What a request
showed is therefore judged a moment after its end, when its events have surely come, and everything that the events of
that time explain is no drift:

- less was hit, and the first missing block was removed since the request was routed: an eviction in between;
- more was hit, and by now the index knows those blocks too: another request's prefill in between, or a late event;
- the holder was emptied since: nothing can be said.

What stays unexplained, and differs by more than one block, counts. It calls for a remedy when, of the last
`window_requests`, at least `min_requests` differ in the same direction and by at least `min_ratio` of the tokens.

Remedies, from cheap to dear: `CheckTail` (ask for what follows the last message known, which repairs a lost tail and
costs nothing otherwise), and if that has brought nothing and too much is still claimed, `Rebuild` (forget everything
and replay). Too little claimed never leads to a rebuild: what the index has is right then, and forgetting it would help
nobody. Remedies come at most once per back-off, which doubles until a whole window passes without drift.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from enum import StrEnum

from msgspec import Struct

from kvrelay.core.model.prompt import BlockKeys

_MAX_REMOVALS = 8_192  # remembered per rank; a request that was routed before the oldest of them cannot be judged
_MAX_SUSPECTS = 64  # waiting for judgement per rank; more arrive only faster than anybody could look at them


class DriftKind(StrEnum):
    """In which direction claim and outcome differ."""

    OVER_CLAIM = "over_claim"  # the index believes too much: a removal was lost
    UNDER_CLAIM = "under_claim"  # it knows too little: a stored event was lost, or prompts are read differently


class DriftBounds(Struct, frozen=True, kw_only=True):
    """When differences call for a remedy, and how often one may be tried."""

    window_requests: int = 32
    min_requests: int = 3
    min_ratio: float = 0.05  # of the tokens claimed or hit in the window, whichever is more per request
    settle_s: float = 0.5  # from a request's end to its judgement
    backoff_s: float = 5.0
    max_backoff_s: float = 3_600.0


class Outcome(Struct, frozen=True, eq=False):
    """One request that ended well. Depths are leading blocks of its prompt."""

    routed_at: float
    finished_at: float
    keys: BlockKeys
    claimed_blocks: int  # resident in the fastest tier when it was routed
    expected_blocks: int  # the same, or deeper: in any tier, or being computed by others
    actual_blocks: int


class CheckTail(Struct, frozen=True):
    """Ask the worker for what follows the last message known."""

    kind: DriftKind
    requests: int  # of the window
    tokens: int


class Rebuild(Struct, frozen=True):
    """Forget what the rank is believed to have, and replay its history."""

    kind: DriftKind
    requests: int
    tokens: int


class _Seen(Struct, frozen=True):
    """One compared request in the window, in blocks."""

    kind: DriftKind | None
    difference: int
    basis: int


class Drift:
    """Of one rank of one incarnation. `depth_now` answers how many leading blocks of a prompt the index knows now."""

    def __init__(self, bounds: DriftBounds, depth_now: Callable[[BlockKeys], int]) -> None:
        self._bounds = bounds
        self._depth_now = depth_now
        self._window: deque[_Seen] = deque(maxlen=bounds.window_requests)
        self._suspects: deque[Outcome] = deque()
        self._removed_at: dict[int, float] = {}  # block key -> when, oldest first
        self._forgotten_until = float("-inf")  # removals up to here may have been dropped from memory
        self._quiet_until = float("-inf")
        self._backoff_s = bounds.backoff_s
        self._tail_asked = False  # and not answered yet
        self._tail_was_whole = False  # the last tail check found nothing missing
        self._calm_requests = 0  # compared since the last one that drifted
        self.drifted: dict[DriftKind, int] = dict.fromkeys(DriftKind, 0)
        self.compared = 0
        self.remedies = 0

    # --- what happens ------------------------------------------------------------------------------------------------

    def removed(self, now: float, keys: Iterable[int]) -> None:
        """The worker's events took these blocks from the index."""
        memory = self._removed_at
        for key in keys:
            memory.pop(key, None)
            memory[key] = now
        while len(memory) > _MAX_REMOVALS:
            oldest = next(iter(memory))
            self._forgotten_until = memory.pop(oldest)

    def emptied(self, now: float) -> None:
        """The index forgot the rank: what was routed before says nothing any more."""
        self._window.clear()
        self._suspects.clear()
        self._removed_at.clear()
        self._forgotten_until = now
        self._tail_asked = False

    def tail_checked(self, *, brought_news: bool) -> None:
        """A replay ended: did it bring batches that were not known? Counts if it is the answer to `CheckTail`."""
        if self._tail_asked:
            self._tail_was_whole = not brought_news
        self._tail_asked = False

    def finished(self, now: float, outcome: Outcome, block_size_tokens: int) -> CheckTail | Rebuild | None:
        """A request ended; answers what is to be done about all those that can be judged by now."""
        if not _suspicious(outcome):
            self._count(_Seen(None, 0, max(outcome.claimed_blocks, outcome.actual_blocks)))
        elif len(self._suspects) < _MAX_SUSPECTS:
            self._suspects.append(outcome)
        drifted = False
        while self._suspects and now - self._suspects[0].finished_at >= self._bounds.settle_s:
            seen = self._judge(self._suspects.popleft())
            self._count(seen)
            drifted = drifted or seen.kind is not None
        return self._remedy(now, block_size_tokens) if drifted else None

    @property
    def calm(self) -> bool:
        """A whole window passed without drift."""
        return self._calm_requests >= self._bounds.window_requests

    # --- judgement ---------------------------------------------------------------------------------------------------

    def _judge(self, outcome: Outcome) -> _Seen:
        claimed, actual = outcome.claimed_blocks, outcome.actual_blocks
        basis = max(claimed, actual)
        if actual < claimed:
            if self._may_have_been_removed(outcome, at=actual):
                return _Seen(None, 0, basis)
            return _Seen(DriftKind.OVER_CLAIM, claimed - actual, basis)
        known = self._depth_now(outcome.keys)
        if known >= actual - 1 or self._may_have_been_removed(outcome, at=known):
            return _Seen(None, 0, basis)
        return _Seen(DriftKind.UNDER_CLAIM, actual - outcome.expected_blocks, basis)

    def _may_have_been_removed(self, outcome: Outcome, *, at: int) -> bool:
        """Did the block that ends the match go away since the request was routed?"""
        if outcome.routed_at <= self._forgotten_until:
            return True
        gone_at = self._removed_at.get(outcome.keys.item(at)) if at < len(outcome.keys) else None
        return gone_at is not None and gone_at >= outcome.routed_at

    def _count(self, seen: _Seen) -> None:
        self.compared += 1
        self._window.append(seen)
        if seen.kind is not None:
            self.drifted[seen.kind] += 1
            self._calm_requests = 0
            return
        self._calm_requests += 1
        if self.calm:
            self._backoff_s = self._bounds.backoff_s
            self._tail_was_whole = False

    # --- remedies ----------------------------------------------------------------------------------------------------

    def _remedy(self, now: float, block_size_tokens: int) -> CheckTail | Rebuild | None:
        if now < self._quiet_until:
            return None
        for kind in DriftKind:
            requests, blocks = self._evidence(kind)
            basis = sum(seen.basis for seen in self._window)
            if requests < self._bounds.min_requests or blocks < self._bounds.min_ratio * basis:
                continue
            self._quiet_until = now + self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, self._bounds.max_backoff_s)
            self._window.clear()
            self.remedies += 1
            if kind is DriftKind.OVER_CLAIM and self._tail_was_whole:
                self._tail_was_whole = False
                return Rebuild(kind, requests, blocks * block_size_tokens)
            self._tail_asked = True
            return CheckTail(kind, requests, blocks * block_size_tokens)
        return None

    def _evidence(self, kind: DriftKind) -> tuple[int, int]:
        """Requests that drifted this way, and by how many blocks together."""
        differences = [seen.difference for seen in self._window if seen.kind is kind]
        return len(differences), sum(differences)


def _suspicious(outcome: Outcome) -> bool:
    """Beyond one block. What was claimed of lower tiers or of running prefills need not come true."""
    return outcome.actual_blocks < outcome.claimed_blocks - 1 or outcome.actual_blocks > outcome.expected_blocks + 1
