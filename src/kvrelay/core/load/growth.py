"""Which conversations live where, and what one of them comes to: the load that is still ahead.

What a worker has in hand says little about a conversation that begins: it will come back with every turn, and so will
the others that live there. A router that looks at queues only puts all first turns where it is quiet at the moment,
and finds them loud together later. So beginnings are counted per slot, fading within minutes, and multiplied with the
prefill that a conversation has brought on average. The product is an expectation in tokens that scorers can weigh
against recomputing a shared prefix elsewhere. The same holds for a turn that leaves its worker because of a short
queue: the turns after it go with it, so a conversation that moves is weighed like one that begins.

A prompt continues a conversation when an earlier prompt ended inside it; else it begins one, however much of it (a
system prompt, say) is cached. Ends are remembered by block key, the latest ones, so no session id is needed. Looked for
is only as far back from the end of the match as an answer may be long: what follows an earlier prompt in the next one
is its answer, and the engine has that cached. An end is continued once: where prompts fork behind one, as behind a
prompt that is no longer than the system prompt of all, the first goes on with that conversation and the others begin.

The expectation is bounded by what it may cost the request at hand: for the sake of later turns a prompt is computed
again elsewhere, but it does not wait behind others for long while a worker stands idle. Without the bound a worker that
joins a fleet of thousands of conversations would get every new one until it had caught up.

Keys are chained, so a prompt that runs through an end runs through the
block at which the end's *stretch* of blocks begins, too: one look-up per stretch is enough where nothing ended.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from kvrelay.core.load.fading import Fading
from kvrelay.core.model.arrays import Floats, Ints
from kvrelay.core.model.prompt import BlockKeys

_HALF_LIFE_S = 300.0
_RESCALE_S = 3_000.0
# Weigh even spreading against computing a shared prefix twice; found on random orders of arrival (decision 0011).
COMPUTED_AGAIN = 3.0  # times the tokens that are held here and not elsewhere: they cost computing, and delay others
TO_COME = 1.75  # times what conversations will still bring: that delays others, too, and may come elsewhere after all
_WAITED_FOR = 1.0  # times the prompt
_MOST_ENDS = 20_000  # some 350 bytes each
_ANSWER_BLOCKS = 256
_STRETCH_BLOCKS = 16


class Conversation(Struct, frozen=True, gc=False):
    """A conversation that goes on: where its last prompt was sent, and when its first."""

    slot: int
    begun_at: float
    life: int  # of what had the slot then, see `Growth.drop_slot`
    end: int  # last block of that prompt
    head: int  # first block of the stretch in which it lies


class Growth:
    """Expected load per slot."""

    def __init__(self) -> None:
        self._begun: list[float] = []  # weighed, see `_weight`
        self._table: Floats = np.zeros(0)  # the same, for scorers of many
        self._lives: list[int] = []
        self._all_begun = 0.0
        self._prefilled = 0.0
        self._fading = Fading(half_life_s=_HALF_LIFE_S, rescale_s=_RESCALE_S)
        self._ends: OrderedDict[int, Conversation] = OrderedDict()  # last block of a prompt -> whose; oldest first
        self._ends_in: dict[int, int] = {}  # first block of a stretch -> how many end in it

    def add_slot(self, slot: int) -> None:
        """Start a slot at zero."""
        if slot == len(self._begun):
            self._begun.append(0.0)
            self._lives.append(0)
            self._table = np.append(self._table, 0.0)
        self.drop_slot(slot)

    def drop_slot(self, slot: int) -> None:
        """What began there has lost its cache, and will begin anew wherever it goes."""
        self._all_begun = max(0.0, self._all_begun - self._begun[slot])
        self._lives[slot] += 1
        self._set(slot, 0.0)

    def continues(self, keys: BlockKeys, matched_blocks: int) -> Conversation | None:
        """What this prompt goes on with; None: it begins. `matched_blocks`: the deepest match of its keys anywhere."""
        first, beyond = max(0, matched_blocks - _ANSWER_BLOCKS), matched_blocks + 1
        start = first - first % _STRETCH_BLOCKS
        heads = keys[start:beyond:_STRETCH_BLOCKS].tolist()
        if self._ends_in.keys().isdisjoint(heads):
            return None
        latest: Conversation | None = None
        for head in heads:
            end_of_stretch = min(start + _STRETCH_BLOCKS, beyond)
            if head in self._ends_in:
                for key in keys[max(start, first) : end_of_stretch].tolist():
                    latest = self._ends.get(key, latest)
            start = end_of_stretch
        return latest if latest is not None and latest.life == self._lives[latest.slot] else None

    def placed(
        self,
        now: float,
        slot: int,
        keys: BlockKeys,
        *,
        matched_tokens: int,
        prefill_tokens: int,
        continues: Conversation | None,
    ) -> None:
        """A prompt was sent to a slot, which holds that much of it and has that much to compute.

        Of a prompt that nobody holds any of, it cannot be told what is its conversation's own and what is a prefix that
        others will share: it does not count for what a conversation brings. A conversation that moves takes what it
        will still bring with it.
        """
        weight = self._weight(now)
        if matched_tokens or continues is not None:
            self._prefilled += prefill_tokens * weight
        if continues is None:
            self._set(slot, self._begun[slot] + weight)
            self._all_begun += weight
        elif continues.slot != slot:
            own = self._own(continues)
            self._set(continues.slot, self._begun[continues.slot] - own)
            self._set(slot, self._begun[slot] + own)
        if len(keys):
            if continues is not None:
                self._forget_end(continues.end)
            self._note_end(keys, slot, now if continues is None else continues.begun_at)

    def _note_end(self, keys: BlockKeys, slot: int, begun_at: float) -> None:
        last = len(keys) - 1
        end, head = keys.item(last), keys.item(last - last % _STRETCH_BLOCKS)
        self._forget_end(end)
        self._ends_in[head] = self._ends_in.get(head, 0) + 1
        self._ends[end] = Conversation(slot, begun_at, self._lives[slot], end, head)
        if len(self._ends) > _MOST_ENDS:
            self._forget_end(next(iter(self._ends)))

    def _forget_end(self, end: int) -> None:
        known = self._ends.pop(end, None)
        if known is None:
            return
        self._ends_in[known.head] -= 1
        if not self._ends_in[known.head]:
            del self._ends_in[known.head]

    def expected_tokens(
        self,
        now: float,
        slots: Sequence[int],
        continues: Conversation | None,
        *,
        reachable: Sequence[float],
        prompt_tokens: int,
    ) -> list[float]:
        """Prefill that the conversations at each of the slots bring, beyond that of the least of them, as it weighs.

        Of all but the one that `continues` names: what it brings itself, it brings wherever it goes. Bounded by what a
        prompt of so many tokens, of which each slot holds `reachable`, may lose by it.
        """
        if not self._all_begun:
            return [0.0] * len(slots)
        each = self._each(now)
        begun = [self._begun[slot] for slot in slots]
        if continues is not None and continues.slot in slots:
            begun[slots.index(continues.slot)] -= self._own(continues)
        least, bound = min(begun), _WAITED_FOR * prompt_tokens - COMPUTED_AGAIN * min(reachable)
        return [
            min((own - least) * each, bound + COMPUTED_AGAIN * held) for own, held in zip(begun, reachable, strict=True)
        ]

    def expected_tokens_of_many(
        self, now: float, slots: Ints, continues: Conversation | None, *, reachable: Floats, prompt_tokens: int
    ) -> Floats:
        """The same as an array; `slots` ascend."""
        if not self._all_begun:
            return np.zeros(len(slots))
        expected: Floats = self._table.copy() if len(slots) == len(self._table) else self._table.take(slots)
        if continues is not None:
            at = bisect_left(slots.data, continues.slot)
            if at < len(slots) and slots.data[at] == continues.slot:
                expected[at] -= self._own(continues)
        expected -= expected[expected.argmin()]
        expected *= self._each(now)
        bound = reachable * COMPUTED_AGAIN
        bound += _WAITED_FOR * prompt_tokens - bound[bound.argmin()]
        np.minimum(expected, bound, out=expected)
        return expected

    def _own(self, conversation: Conversation) -> float:
        """What is left of the weight with which it began."""
        return min(self._fading.weight(conversation.begun_at), self._begun[conversation.slot])

    def _set(self, slot: int, begun: float) -> None:
        self._begun[slot] = self._table[slot] = begun

    def _each(self, now: float) -> float:
        """What a conversation is taken to bring, divided by the weight in which the beginnings are kept."""
        return TO_COME * self._prefilled / self._all_begun / self._weight(now)

    def _weight(self, now: float) -> float:
        fade = self._fading.overdue(now)
        if fade is not None:
            self._begun = [begun * fade for begun in self._begun]
            self._table *= fade
            self._all_begun *= fade
            self._prefilled *= fade
        return self._fading.weight(now)
