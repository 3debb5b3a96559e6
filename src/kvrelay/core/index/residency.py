"""Who probably holds which block: the routing index.

An estimate, never a proof. It is fed by the workers' own KV events and answers one question: how many leading blocks of
this prompt does each holder (one rank of one incarnation of a worker) have, per tier.

Layout. A *layer* is a set of tiers that is closed upwards in speed: {gpu}, {gpu, cpu}, {gpu, cpu, disk} and so on. The
matched depth of a holder in the first layer is what it can reuse at once; what the next layer adds lies one tier lower.
A layer maps block key -> bit mask of holders. Holders that never announced a lower tier exist in the first layer only
and pay for one. All tables hold plain ints: a million blocks add nothing to what the garbage collector has to walk.

Invariants, each checked by `check()`:
- a holder's bit is set in a layer's mask exactly when it has at least one copy of the block in that layer's tiers;
- copies are counted: an engine may hold one hash several times, each copy with its own stored and removed event;
- a *hole* is a block that a holder lacks while it has one of the block's children; holes are known (`kids` counts the
  children per parent), so that the halving search can be mended where its premise fails;
- blocks whose parent is unknown have no key yet (keys are chained). They wait as orphans, bounded and counted, match
  nothing, and enter when the parent comes.

Dropping or emptying a holder must not stop the event loop, however much it holds. So the outside knows a holder by its
slot, the masks by its bit: a dropped holder's bit leaves the layers at once, which hides it from every match, and its
tables are dismantled by `sweep` in small steps. A bit is given to another holder only after that, a slot at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct

from kvrelay.core.contract.keys import Keyer
from kvrelay.core.index.match import Level, depth_levels, set_where
from kvrelay.core.model.arrays import Floats, Ints
from kvrelay.core.model.census import MASK, Census, digest_of, mixed
from kvrelay.core.model.events import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent
from kvrelay.core.model.prompt import BlockKeys, TokenIds
from kvrelay.core.model.units import Tier

TIERS = (Tier.GPU, Tier.CPU, Tier.DISK, Tier.REMOTE, Tier.PEER)
_LAYER_OF = {tier: i for i, tier in enumerate(TIERS)}


class Applied(Struct, frozen=True):
    """What one event did. Everything that could not be used is counted, never silently dropped."""

    stored: int = 0
    removed: int = 0
    unknown: int = 0  # removed or token-less hashes that nobody had announced
    orphaned: int = 0  # now waiting for their parent
    dropped: int = 0  # orphans beyond the bound
    foreign: int = 0  # blocks of another size than the holder's


class _Orphan(Struct):
    parent: int
    token_ids: TokenIds
    media: str | None
    tier: Tier
    copies: int = 1


class _Held:
    """What one holder has in one layer."""

    __slots__ = ("aliases", "holes", "keys", "kids", "more")

    def __init__(self) -> None:
        self.keys: dict[int, int] = {}  # engine hash -> block key
        self.more: dict[int, int] = {}  # engine hash -> copies beyond the first
        self.aliases: dict[int, int] = {}  # block key -> further engine hashes that mean the same block
        self.kids: dict[int, int] = {}  # block key -> held children
        self.holes: set[int] = set()  # block keys; membership only, never iterated for a decision


class _Holder:
    __slots__ = ("bit", "block_size_tokens", "lower", "orphans", "tables", "waiting")

    def __init__(self, bit: int, block_size_tokens: int) -> None:
        self.bit = bit  # the mask itself, 1 << position
        self.block_size_tokens = block_size_tokens
        self.tables: list[_Held] = [_Held()]
        self.lower: dict[Tier, dict[int, int]] = {}  # copies per hash in each tier below gpu
        self.orphans: dict[int, _Orphan] = {}
        self.waiting: dict[int, list[int]] = {}  # parent hash -> orphans that wait for it


class Residency:
    """The index. One instance serves all workers and block sizes (the size is part of every key)."""

    def __init__(self, keyer: Keyer, *, max_orphan_blocks: int = 50_000) -> None:
        self._keyer = keyer
        self._max_orphan_blocks = max_orphan_blocks
        self._masks: list[dict[int, int]] = [{} for _ in TIERS]
        self._lineage: dict[int, tuple[int, int]] = {}  # block key -> (parent key, depth in blocks)
        self._holders: dict[int, _Holder] = {}
        self._holed: list[int] = [0 for _ in TIERS]
        self._layered: list[int] = [0 for _ in TIERS]  # holders that exist in the layer
        self._retired: list[_Holder] = []
        self._free_positions: list[int] = []
        self._positions = 0
        self._free_slots: list[int] = []
        self._position_of_slot = np.zeros(0, dtype=np.int64)
        self._slot_of_position: dict[int, int] = {}  # of live holders

    # --- holders -------------------------------------------------------------------------------------------------

    def add_holder(self, block_size_tokens: int) -> int:
        """A new, empty holder; answers its slot, a small number that stays its own until `drop_holder`."""
        slot = self._free_slots.pop() if self._free_slots else len(self._holders)
        if slot >= len(self._position_of_slot):
            self._position_of_slot = np.append(self._position_of_slot, 0)
        self._seat(slot, block_size_tokens)
        return slot

    def drop_holder(self, slot: int) -> None:
        """Forget a holder. Takes constant time; `sweep` gives back the memory."""
        self._retire(self._holders.pop(slot))
        self._position_of_slot[slot] = 0
        self._free_slots.append(slot)

    def empty_holder(self, slot: int) -> None:
        """Forget what a holder has, in constant time, but keep it as a holder."""
        holder = self._holders[slot]
        self._retire(holder)
        self._seat(slot, holder.block_size_tokens)

    def resize_holder(self, slot: int, block_size_tokens: int) -> None:
        """The holder's blocks turn out to have another size: what was believed is forgotten."""
        self._retire(self._holders[slot])
        self._seat(slot, block_size_tokens)

    def _seat(self, slot: int, block_size_tokens: int) -> None:
        if self._free_positions:
            position = self._free_positions.pop()
        else:
            position = self._positions
            self._positions += 1
        holder = self._holders[slot] = _Holder(1 << position, block_size_tokens)
        self._position_of_slot[slot] = position
        self._slot_of_position[position] = slot
        self._layered[0] |= holder.bit

    def _retire(self, holder: _Holder) -> None:
        del self._slot_of_position[holder.bit.bit_length() - 1]
        for layer in range(len(TIERS)):
            self._layered[layer] &= ~holder.bit
            self._holed[layer] &= ~holder.bit
        holder.orphans, holder.waiting, holder.lower = {}, {}, {}
        self._retired.append(holder)

    def sweep(self, budget_blocks: int) -> bool:
        """Dismantle at most `budget_blocks` blocks of dropped holders; True while there is more to do."""
        while self._retired and budget_blocks > 0:
            holder = self._retired[-1]
            budget_blocks -= self._dismantle(holder, budget_blocks)
            if not holder.tables:
                self._retired.pop()
                self._free_positions.append(holder.bit.bit_length() - 1)
        return bool(self._retired)

    def has_retired(self) -> bool:
        """Is there anything for `sweep` to do?"""
        return bool(self._retired)

    def _dismantle(self, holder: _Holder, budget_blocks: int) -> int:
        layer = len(holder.tables) - 1
        held, bit = holder.tables[layer], holder.bit
        masks = self._masks[layer]
        done = 0
        while held.keys and done < budget_blocks:
            _, key = held.keys.popitem()
            done += 1
            mask = masks.get(key, 0)
            if mask & bit:
                self._unset(layer, key, mask ^ bit)
        while held.kids and done < budget_blocks:
            held.kids.popitem()
            done += 1
        if not held.keys and not held.kids:
            holder.tables.pop()
        return done or 1

    # --- events --------------------------------------------------------------------------------------------------

    def apply(self, slot: int, event: KvEvent) -> Applied:
        """Let one event of a holder count. Never raises for what a worker may send."""
        holder = self._holders[slot]
        match event:
            case BlocksStored():
                return self._store(holder, event)
            case BlocksRemoved():
                return self._remove(holder, event)
            case BlocksCleared():
                return self._clear(slot, event.tier)
            case _:
                return Applied()

    def hold(self, slot: int, keys: BlockKeys) -> int:
        """Believe that a holder without events has these blocks of one prompt (keys from the first block on).

        Answers how many of them it was believed to have already.
        """
        known = self.held(slot, keys)
        chain = keys[known:].tolist()
        parent = keys.item(known - 1) if known else 0
        self._hold_chain(self._holders[slot], 0, chain, chain, parent, known)
        return known

    def held(self, slot: int, keys: BlockKeys) -> int:
        """How many of these blocks, from the first on, a holder without events has; it never has holes."""
        own = self._holders[slot].tables[0].keys
        view = keys.data
        return bisect_left(view, True, key=lambda key: key not in own)

    def goes_on(self, slot: int, key: int) -> bool:
        """Does the holder have a block that follows this one?"""
        return key in self._holders[slot].tables[0].kids

    def release_end(self, slot: int, key: int) -> int | None:
        """Take back a block of `hold` that nothing follows; answers the block before it, None at the first."""
        parent, depth = self._lineage[key]
        self._drop_copy(self._holders[slot], 0, key)
        return parent if depth > 1 else None

    def _store(self, holder: _Holder, event: BlocksStored) -> Applied:
        if event.block_size_tokens != holder.block_size_tokens:
            return Applied(foreign=len(event.hashes))
        layer = _LAYER_OF[event.tier]
        if layer:
            self._ensure_layer(holder, layer)
        if event.token_ids is None:
            return self._store_known(holder, event.hashes, event.tier)
        if event.parent is None:
            parent_key, depth = self._keyer.root(holder.block_size_tokens, adapter=event.adapter, salt=event.salt), 0
            if not event.hashes:
                return Applied()
        else:
            known = holder.tables[-1].keys.get(event.parent)
            if known is None:
                return self._orphan(holder, event, event.parent)
            parent_key, depth = known, self._lineage[known][1]
        self._store_chain(holder, event, parent_key, depth)
        return Applied(stored=len(event.hashes) + self._adopt(holder, event.hashes))

    def _store_chain(self, holder: _Holder, event: BlocksStored, parent_key: int, depth: int) -> None:
        assert event.token_ids is not None
        keys = self._keyer.extend(parent_key, depth, event.token_ids, holder.block_size_tokens, media=event.media)
        self._add_copies(holder, event.hashes, keys.tolist(), parent_key, depth, event.tier)

    def _store_known(self, holder: _Holder, hashes: tuple[int, ...], tier: Tier) -> Applied:
        """A copy in another tier, announced without tokens: it counts if the block is known from any tier."""
        unknown = 0
        for block_hash in hashes:
            key = holder.tables[-1].keys.get(block_hash)
            if key is None:
                unknown += 1
            else:
                parent, depth = self._lineage[key]
                self._add_copies(holder, (block_hash,), (key,), parent, depth - 1, tier)
        return Applied(stored=len(hashes) - unknown, unknown=unknown)

    def _remove(self, holder: _Holder, event: BlocksRemoved) -> Applied:
        first = _LAYER_OF[event.tier]
        removed = 0
        for block_hash in event.hashes:
            if self._has_copy(holder, block_hash, event.tier):
                if first:
                    _decrement(holder.lower[event.tier], block_hash)
                for layer in range(first, len(holder.tables)):
                    self._drop_copy(holder, layer, block_hash)
                removed += 1
            elif self._drop_orphan_copy(holder, block_hash):
                removed += 1
        return Applied(removed=removed, unknown=len(event.hashes) - removed)

    def _clear(self, slot: int, tier: Tier | None) -> Applied:
        holder = self._holders[slot]
        if tier is None or (tier is Tier.GPU and not holder.lower):
            removed = len(holder.tables[-1].keys)
            self.empty_holder(slot)
            return Applied(removed=removed)
        removed = self._remove(holder, BlocksRemoved(self._copies_in(holder, tier), tier)).removed
        holder.orphans = {block_hash: o for block_hash, o in holder.orphans.items() if o.tier is not tier}
        self._rebuild_waiting(holder)
        return Applied(removed=removed)

    def _copies_in(self, holder: _Holder, tier: Tier) -> tuple[int, ...]:
        """Every hash of one tier, as often as it has copies there."""
        if tier is Tier.GPU:
            held = holder.tables[0]
            return tuple(h for h in held.keys for _ in range(1 + held.more.get(h, 0)))
        return tuple(h for h, copies in holder.lower.get(tier, {}).items() for _ in range(copies))

    # --- orphans -------------------------------------------------------------------------------------------------

    def _orphan(self, holder: _Holder, event: BlocksStored, parent: int) -> Applied:
        assert event.token_ids is not None
        size, room = holder.block_size_tokens, self._max_orphan_blocks - len(holder.orphans)
        orphaned = dropped = 0
        for i, block_hash in enumerate(event.hashes):
            waiting = holder.orphans.get(block_hash)
            if waiting is not None:
                waiting.copies += 1
            elif orphaned < room:
                tokens = np.array(event.token_ids[i * size : (i + 1) * size])  # a copy: the batch need not stay alive
                media = event.media[i] if event.media is not None and i < len(event.media) else None
                holder.orphans[block_hash] = _Orphan(parent, tokens, media, event.tier)
                holder.waiting.setdefault(parent, []).append(block_hash)
                orphaned += 1
            else:
                dropped += 1
            parent = block_hash
        # A block whose parent was evicted may be held itself, and then its children need not wait.
        known = holder.tables[-1].keys
        adopted = self._adopt(holder, [block_hash for block_hash in event.hashes if block_hash in known])
        return Applied(stored=adopted, orphaned=max(0, orphaned - adopted), dropped=dropped)

    def _adopt(self, holder: _Holder, arrived: Iterable[int]) -> int:
        """Give keys to the orphans whose parents just arrived, and to theirs; answers how many entered."""
        if not holder.waiting:
            return 0
        adopted = 0
        parents = list(arrived)
        while parents:
            parent = parents.pop()
            for block_hash in holder.waiting.pop(parent, ()):
                orphan = holder.orphans.pop(block_hash, None)
                if orphan is None:
                    continue
                self._admit_orphan(holder, block_hash, orphan)
                parents.append(block_hash)
                adopted += 1
        return adopted

    def _admit_orphan(self, holder: _Holder, block_hash: int, orphan: _Orphan) -> None:
        parent_key = holder.tables[-1].keys[orphan.parent]
        depth = self._lineage[parent_key][1]
        media = None if orphan.media is None else (orphan.media,)
        keys = self._keyer.extend(parent_key, depth, orphan.token_ids, holder.block_size_tokens, media=media)
        if len(keys):
            for _ in range(orphan.copies):
                self._add_copies(holder, (block_hash,), (keys.item(0),), parent_key, depth, orphan.tier)

    def _drop_orphan_copy(self, holder: _Holder, block_hash: int) -> bool:
        orphan = holder.orphans.get(block_hash)
        if orphan is None:
            return False
        orphan.copies -= 1
        if not orphan.copies:
            del holder.orphans[block_hash]  # its children go on waiting for it: it may be stored again
            siblings = holder.waiting.get(orphan.parent)
            if siblings is not None:
                siblings.remove(block_hash)
                if not siblings:
                    del holder.waiting[orphan.parent]
        return True

    def _rebuild_waiting(self, holder: _Holder) -> None:
        holder.waiting = {}
        for block_hash, orphan in holder.orphans.items():
            holder.waiting.setdefault(orphan.parent, []).append(block_hash)

    # --- copies, bits and holes ----------------------------------------------------------------------------------

    def _has_copy(self, holder: _Holder, block_hash: int, tier: Tier) -> bool:
        if tier is Tier.GPU:
            return block_hash in holder.tables[0].keys
        return block_hash in holder.lower.get(tier, ())

    def _add_copies(
        self, holder: _Holder, hashes: Sequence[int], keys: Sequence[int], parent: int, depth: int, tier: Tier
    ) -> None:
        """One more copy of each block of a chain that continues `parent`, which lies at `depth`."""
        first = _LAYER_OF[tier]
        if first:
            own = holder.lower.setdefault(tier, {})
            for block_hash in hashes:
                own[block_hash] = own.get(block_hash, 0) + 1
        for layer in range(first, len(holder.tables)):
            self._hold_chain(holder, layer, hashes, keys, parent, depth)

    def _hold_chain(
        self, holder: _Holder, layer: int, hashes: Sequence[int], keys: Sequence[int], parent: int, depth: int
    ) -> None:
        """The hot loop of event ingest: everything it touches is local, and a block costs five table entries."""
        held, bit, masks, lineage = holder.tables[layer], holder.bit, self._masks[layer], self._lineage
        own_keys, kids, holes = held.keys, held.kids, held.holes
        for block_hash, key in zip(hashes, keys, strict=False):
            depth += 1
            if block_hash in own_keys:
                held.more[block_hash] = held.more.get(block_hash, 0) + 1
            else:
                own_keys[block_hash] = key
                mask = masks.get(key, 0)
                if mask & bit:
                    held.aliases[key] = held.aliases.get(key, 0) + 1
                else:
                    masks[key] = mask | bit
                    if not mask:
                        lineage[key] = (parent, depth)
                    if depth > 1:
                        siblings = kids.get(parent, 0)
                        kids[parent] = siblings + 1
                        if not siblings and not masks.get(parent, 0) & bit:
                            holes.add(parent)
                    if holes:
                        holes.discard(key)
            parent = key
        self._note_holes(layer, holder)

    def _note_holes(self, layer: int, holder: _Holder) -> None:
        if holder.tables[layer].holes:
            self._holed[layer] |= holder.bit
        else:
            self._holed[layer] &= ~holder.bit

    def _drop_copy(self, holder: _Holder, layer: int, block_hash: int) -> None:
        held, bit = holder.tables[layer], holder.bit
        if block_hash in held.more:
            _decrement(held.more, block_hash)
            return
        key = held.keys.pop(block_hash)
        if key in held.aliases:
            _decrement(held.aliases, key)
            return
        parent, depth = self._lineage[key]
        self._unset(layer, key, self._masks[layer][key] ^ bit)
        if key in held.kids:
            held.holes.add(key)
        if depth > 1:
            _decrement(held.kids, parent)
            if parent not in held.kids:
                held.holes.discard(parent)
        self._note_holes(layer, holder)

    def _unset(self, layer: int, key: int, mask: int) -> None:
        masks = self._masks[layer]
        if mask:
            masks[key] = mask
            return
        del masks[key]
        if not any(key in other for other in self._masks):
            del self._lineage[key]

    def _ensure_layer(self, holder: _Holder, layer: int) -> None:
        """Begin to keep the holder's lower layers. Copies what it has, which is little at its first offload."""
        while len(holder.tables) <= layer:
            above, new = holder.tables[-1], len(holder.tables)
            holder.tables.append(_Held())
            self._layered[new] |= holder.bit
            for block_hash, key in above.keys.items():
                parent, depth = self._lineage[key]
                self._hold_chain(holder, new, (block_hash,), (key,), parent, depth - 1)
            holder.tables[new].more.update(above.more)

    # --- questions -----------------------------------------------------------------------------------------------

    def depths(self, keys: BlockKeys, *, layer: int = 0) -> Ints:
        """Matched leading blocks of the prompt per slot (0 where nothing matches); int64, indexed by slot."""
        return self.tokens(keys, 1, layer=layer).astype(np.int64)

    def tokens(self, keys: BlockKeys, block_size_tokens: int, *, layer: int = 0) -> Floats:
        """The same in tokens, as floats: what scorers of many calculate with."""
        by_position = np.zeros(max(self._positions, 1))
        for mask, depth in self._levels(keys, layer):
            set_where(by_position, mask, depth * block_size_tokens)
        by_slot: Floats = by_position.take(self._position_of_slot)
        return by_slot

    def tell_depths(self, keys: BlockKeys, block_size_tokens: int, tokens: list[int], *, layer: int = 0) -> None:
        """The same in plain numbers and in tokens, for few holders: writes into `tokens` whoever matches anything."""
        for mask, depth in self._levels(keys, layer):
            while mask:
                lowest = mask & -mask
                tokens[self._slot_of_position[lowest.bit_length() - 1]] = depth * block_size_tokens
                mask ^= lowest

    def _levels(self, keys: BlockKeys, layer: int) -> list[Level]:
        masks, holed = self._masks[layer], self._holed[layer]
        levels = depth_levels(masks, keys, self._layered[layer] & ~holed)
        if holed and len(keys):
            affected = holed & masks.get(keys.item(0), 0)
            while affected:
                bit = affected & -affected
                levels += self._exact(bit, keys, layer)
                affected ^= bit
        return levels

    def _exact(self, bit: int, keys: BlockKeys, layer: int) -> list[Level]:
        """The level of a holder with holes: before its first hole on this chain, its blocks are gapless again."""
        holder = next(h for h in self._holders.values() if h.bit == bit)
        holes = holder.tables[layer].holes
        first_hole = next((i for i, key in enumerate(keys.tolist()) if key in holes), len(keys))
        return depth_levels(self._masks[layer], keys[:first_hole], bit)

    def deeper_layers(self) -> list[int]:
        """Layers below the first that any holder uses."""
        return [layer for layer in range(1, len(TIERS)) if self._layered[layer]]

    def blocks(self, slot: int) -> dict[Tier, int]:
        """Distinct engine hashes per tier."""
        holder = self._holders[slot]
        counts = {Tier.GPU: len(holder.tables[0].keys)}
        counts.update((tier, len(own)) for tier, own in holder.lower.items())
        return counts

    def census(self, slot: int) -> Census:
        """To be compared with what an agent counted. Walks the holder's blocks: about 0.1 s for a million."""
        holder = self._holders[slot]
        held, gpu = holder.tables[-1].keys, holder.tables[0]
        digest = digest_of(gpu.keys, len(gpu.keys))
        digest += sum(mixed(name) * copies for name, copies in gpu.more.items())
        digest += sum(mixed(name) * copies for own in holder.lower.values() for name, copies in own.items())
        digest += sum(mixed(name) * orphan.copies for name, orphan in holder.orphans.items())
        return Census(len(held) + sum(name not in held for name in holder.orphans), digest & MASK)

    def keys_of(self, slot: int, hashes: Iterable[int]) -> list[int]:
        """Block keys of those hashes that the holder has in the fastest tier."""
        known = self._holders[slot].tables[0].keys
        return [known[block_hash] for block_hash in hashes if block_hash in known]

    def orphans(self, slot: int) -> int:
        return len(self._holders[slot].orphans)

    def size(self) -> int:
        """Distinct blocks known in the fastest tier, holders under dismantling included."""
        return len(self._masks[0])

    def check(self) -> None:
        """Assert the invariants of the module text; for tests and idle moments (walks everything)."""
        for slot, holder in self._holders.items():
            bit = holder.bit
            for layer, held in enumerate(holder.tables):
                masks = self._masks[layer]
                mine = {key for key, mask in masks.items() if mask & bit}
                assert mine == set(held.keys.values()), f"slot {slot} layer {layer}: bits and tables differ"
                kids: dict[int, int] = {}
                for key in mine:
                    parent, depth = self._lineage[key]
                    if depth > 1:
                        kids[parent] = kids.get(parent, 0) + 1
                assert kids == held.kids, f"slot {slot} layer {layer}: children are counted wrong"
                assert held.holes == set(kids) - mine, f"slot {slot} layer {layer}: holes differ"
                assert bool(held.holes) == bool(self._holed[layer] & bit)
            waiting = sorted(h for hashes in holder.waiting.values() for h in hashes)
            assert waiting == sorted(holder.orphans), f"slot {slot}: orphans and waiting list differ"
        held_keys = {key for masks in self._masks for key in masks}
        assert held_keys == set(self._lineage), "lineage is kept for exactly the held blocks"


def _decrement(counts: dict[int, int], name: int) -> None:
    left = counts[name] - 1
    assert left >= 0, f"count of {name} fell below zero"
    if left:
        counts[name] = left
    else:
        del counts[name]
