"""Residency guessed from what was routed, for workers that publish no events.

Bounded per holder; the blocks used longest ago are forgotten first, tails before heads, which is what a paged engine
with a free queue does too. It is a guess about a cache whose size we were not told, and marked as such wherever it
shows.

A block was last used when the latest of the prompts that run through it was served. So the order of use is kept per
prompt, under its last block, and not per block: serving a prompt costs what is new in it, and serving a known one
again costs one move, however long it is.

What was not used for `ttl_s` is forgotten as well: the engine has other work that we may not see, and a guess gets
worse with age. And every answer corrects it: an engine that hit less than was believed has lost the rest, and one that
hit more is believed from then on.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Self

from kvrelay.core.index.residency import Residency
from kvrelay.core.model.prompt import BlockKeys


class Approximate:
    """What one holder probably has. Owns nothing but the order of use; the blocks live in the residency index.

    A held block without a child is the end of a remembered prompt: nothing is held that `_forget_oldest` cannot reach.
    """

    def __init__(self, residency: Residency, slot: int, *, max_blocks: int, ttl_s: float) -> None:
        self._residency = residency
        self._slot = slot
        self._max_blocks = max_blocks
        self._blocks = 0
        self._ttl_s = ttl_s
        self._ends: OrderedDict[int, float] = OrderedDict()  # last block of each prompt -> last use, the oldest first

    def __len__(self) -> int:
        return self._blocks

    def served(self, now: float, keys: BlockKeys) -> None:
        """A prompt with these blocks went through the holder's prefill."""
        keys = keys[: self._max_blocks]
        if not len(keys):
            return
        end = keys.item(-1)
        if end in self._ends:
            self._ends[end] = now
            self._ends.move_to_end(end)
            return
        known = self._residency.hold(self._slot, keys)
        self._blocks += len(keys) - known
        if known and known < len(keys):
            self._ends.pop(keys.item(known - 1), None)  # it goes on now
        self._ends[end] = now
        while self._blocks > self._max_blocks:
            self._forget_oldest(self._blocks - self._max_blocks)

    def corrected(self, keys: BlockKeys, *, actual_blocks: int) -> None:
        """The engine hit only the first `actual_blocks` of what we believed: the rest is gone."""
        believed = self._residency.held(self._slot, keys)
        if believed > actual_blocks:
            self.give_back(keys.item(believed - 1), believed - actual_blocks)

    def next_expiry(self) -> float | None:
        """When the prompt that was used longest ago is to be forgotten."""
        oldest = next(iter(self._ends.values()), None)
        return None if oldest is None else oldest + self._ttl_s

    def expire(self, now: float, budget_blocks: int) -> int:
        """Forget what is too old, at most so many blocks at once; answers how many."""
        before = self._blocks
        while (due := self.next_expiry()) is not None and due <= now and before - self._blocks < budget_blocks:
            self._forget_oldest(budget_blocks - (before - self._blocks))
        return before - self._blocks

    def remembers(self, end: int) -> bool:
        """Does a remembered prompt end with this block?"""
        return end in self._ends

    def emptied(self) -> Self:
        """One of the same kind that believes nothing."""
        return type(self)(self._residency, self._slot, max_blocks=self._max_blocks, ttl_s=self._ttl_s)

    def _forget_oldest(self, blocks: int) -> None:
        self.give_back(next(iter(self._ends)), blocks)

    def give_back(self, end: int, blocks: int) -> None:
        """Give up to that many blocks back, from `end` towards the head, until another prompt needs the next one."""
        oldest = next(iter(self._ends.values()), 0.0)
        self._ends.pop(end, None)
        at: int | None = end
        while at is not None and blocks and at not in self._ends and not self._residency.goes_on(self._slot, at):
            at = self._residency.release_end(self._slot, at)
            self._blocks -= 1
            blocks -= 1
        if at is not None and at not in self._ends and not self._residency.goes_on(self._slot, at):
            self._ends[at] = oldest  # the next to go, so that the order is one of time as well
            self._ends.move_to_end(at, last=False)
