"""The same guess for a server that keeps whole prompts instead of blocks, as llama.cpp does.

Such a server continues one of the prompts that it keeps, and writes the new one over it: what came after the common
part is gone for everybody, although no room was needed. Only where less than half of the old prompt would stay does it
put that one aside first. And it continues a prompt only if more than a tenth of the new one is in it. Which prompt it
takes among equals we cannot know; the one used last is as good as any.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict

from kvrelay.core.index.approximate import Approximate
from kvrelay.core.index.residency import Residency
from kvrelay.core.model.prompt import BlockKeys

MAX_PROMPTS = 256  # of which we know what a fork would overwrite; older ones keep their blocks
_ASIDE_BELOW = 0.5  # part of the old prompt that would stay
_CONTINUED_ABOVE = 0.1  # part of the new prompt that is common


class WholePrompts(Approximate):
    """Forks of a prompt take the place of its rest."""

    def __init__(self, residency: Residency, slot: int, *, max_blocks: int, ttl_s: float) -> None:
        super().__init__(residency, slot, max_blocks=max_blocks, ttl_s=ttl_s)
        self._prompts: OrderedDict[int, BlockKeys] = OrderedDict()  # by their last block, the one used last at the end

    def served(self, now: float, keys: BlockKeys) -> None:
        self._overwrite(keys)
        super().served(now, keys)
        if len(keys):
            end = keys.item(-1)
            self._prompts[end] = keys
            self._prompts.move_to_end(end)
        while len(self._prompts) > MAX_PROMPTS:
            self._prompts.popitem(last=False)

    def _overwrite(self, keys: BlockKeys) -> None:
        end, common = self._continued_by(keys)
        if end is None or common <= _CONTINUED_ABOVE * len(keys):
            return
        prompt = self._prompts[end]
        if _ASIDE_BELOW * len(prompt) <= common < len(prompt):
            del self._prompts[end]
            self.give_back(end, len(prompt) - common)

    def _continued_by(self, keys: BlockKeys) -> tuple[int | None, int]:
        """Last block of the prompt with the longest common beginning, and how long that is, in blocks."""
        best: int | None = None
        longest = 0
        for end, prompt in reversed(self._prompts.items()):
            if not self.remembers(end):
                continue
            common = _common_blocks(prompt, keys)
            if common > longest:
                best, longest = end, common
            if longest == len(keys):
                break
        return best, longest


def _common_blocks(one: BlockKeys, other: BlockKeys) -> int:
    """Keys are chained: where two differ, all that follow differ."""
    return bisect_left(range(min(len(one), len(other))), True, key=lambda at: one.item(at) != other.item(at))
