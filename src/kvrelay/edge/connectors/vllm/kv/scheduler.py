"""The connector's half in the scheduler's process: decides what is loaded and what is saved; moves no bytes.

    arrived --(background: name chunks, ask the store)--> matched --> allocated --> orders --> reported --> finished

The engine's scheduler serves everybody, so nothing here waits: a lookup runs in the background while the scheduler is
told "ask again", and after its deadline the request is computed like any other. What a request could not load once, it
does not try to load again; otherwise an engine whose policy is `recompute` would match, fail and match without end.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from msgspec import Struct

from kvrelay.core.contract.identity import Namespace
from kvrelay.edge.connectors.vllm.kv.chain import Chain, rank_key
from kvrelay.edge.connectors.vllm.kv.orders import HIT, ChunkLoad, Load, Save, StepOrders, StepReports
from kvrelay.edge.connectors.vllm.kv.records import LoadRecord, Records
from kvrelay.edge.connectors.vllm.kv.request import Lookup, Tracked
from kvrelay.edge.connectors.vllm.kv.store import ChunkStore
from kvrelay.edge.connectors.vllm.kv.switch import Switch
from kvrelay.edge.stores.tiered import ChunkShape

log = logging.getLogger(__name__)
REMEMBERED_KEYS = 65_536
LOOKUP_THREADS = 2
SAVE_AGAIN_AFTER_S = 30.0
PATIENCE_WITH_SAVES_S = 30.0
PATIENCE_WITH_LOADS_S = 10.0
SWITCHED_OFF = "switched_off"


class Geometry(Struct, frozen=True):
    """How the engine's blocks become the store's chunks."""

    block_size_tokens: int
    chunk_blocks: int
    chunk_bytes: int  # on one rank
    ranks: int = 1

    @property
    def chunk_tokens(self) -> int:
        return self.block_size_tokens * self.chunk_blocks

    @property
    def shape(self) -> ChunkShape:
        """As far as a look-up asks for it."""
        return ChunkShape(tokens=self.chunk_tokens, payload_bytes=self.chunk_bytes, layers=0, dtype="")


class Scheduled(Struct, frozen=True):
    """One request of a step. `new_tokens` leaves out guesses that may be taken back."""

    request_id: str
    computed_tokens: int  # before the step
    new_tokens: int
    block_ids: tuple[int, ...] = ()
    replaces_blocks: bool = False  # `block_ids` are all of its blocks, not more of them


class Unidentified(Exception):
    """The request's KV cannot be named now; the text is the reason, one word."""


class SchedulerHalf:
    """Called by the engine's scheduler only; `namespace_of` runs in background threads."""

    def __init__(
        self,
        *,
        geometry: Geometry,
        loads: bool,
        saves: bool,
        store: ChunkStore,
        namespace_of: Callable[[str | None, str | None], Namespace],
        records: Records,
        lookup_deadline_ms: float,
        save_generated: bool,
        switch: Switch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`namespace_of(salt, adapter_path)` may take its time; raises Unidentified."""
        self._geometry = geometry
        self._may_load = loads
        self._may_save = saves
        self._store = store
        self._namespace_of = namespace_of
        self._records = records
        self._deadline_s = lookup_deadline_ms / 1000
        self._save_generated = save_generated
        self._switch = switch or Switch()
        self._clock = clock
        self._threads = ThreadPoolExecutor(LOOKUP_THREADS, thread_name_prefix="kvrelay-lookup")
        self._tracked: dict[str, Tracked] = {}
        self._gone: dict[str, Tracked] = {}  # over, while their load is still under way
        self._saved: OrderedDict[bytes, float] = OrderedDict()  # when
        self._loads: list[Load] = []
        self._coming: dict[bytes, float] = {}  # chunks that are being loaded, and since when
        self._saving = 0  # chunks that were ordered to be saved and whose end was not told yet, over all ranks
        self._saving_since = 0.0

    # --- before a request is scheduled -------------------------------------------------------------------------------

    def arrived(self, request: Any) -> None:
        """Starts the lookup, so that its answer may be here when the scheduler asks."""
        tracked = self._tracked[request.request_id] = Tracked(request)
        if tracked.shareable:
            tracked.lookup = self._threads.submit(self._look_up, tracked, list(request.prompt_token_ids))

    def matched(self, request: Any, local_tokens: int) -> int | None:
        """Tokens beyond `local_tokens` that are to be loaded; None: ask again."""
        if request.request_id not in self._tracked:
            self.arrived(request)
        tracked = self._tracked[request.request_id]
        tracked.local_tokens = local_tokens
        if tracked.failed or not tracked.shareable:
            return 0
        lookup = tracked.looked_up()
        if lookup is not None:
            planned = self._plan(tracked, lookup, local_tokens)
            return None if planned and self._comes_anyhow(tracked, lookup, local_tokens) else planned
        now = self._clock()
        tracked.asked_at = now if tracked.asked_at is None else tracked.asked_at
        if now - tracked.asked_at < self._deadline_s:
            return None
        tracked.reason, tracked.failed = "lookup_timeout", True
        return 0

    def _plan(self, tracked: Tracked, lookup: Lookup, local_tokens: int) -> int:
        if lookup.found is None:
            tracked.reason = lookup.reason
            return 0
        if not self._switch.on:
            tracked.reason = SWITCHED_OFF
            return 0
        size = self._geometry.block_size_tokens
        usable = (tracked.request.num_tokens - 1) // size * size  # the last token is always computed
        chunk_tokens = self._geometry.chunk_tokens
        # What may be there must be tried where failing to load it is an error: the engine then ends the request.
        chunks = tracked.request.num_tokens // chunk_tokens if lookup.found.owed else lookup.found.chunks
        there = min(chunks * chunk_tokens, usable)
        tracked.reason = None
        if there <= local_tokens:
            tracked.reason = "absent" if chunks == 0 else "already_local"
        elif not lookup.found.worthwhile:
            tracked.reason = "slower_than_recompute"
        return 0 if tracked.reason is not None else there - local_tokens

    def _comes_anyhow(self, tracked: Tracked, lookup: Lookup, local_tokens: int) -> bool:
        """Whether another request is loading what this one lacks first. It will find it in the engine's own cache then;
        a burst with one prefix reads it once."""
        assert lookup.chain is not None
        first = local_tokens // self._geometry.chunk_tokens
        began = self._coming.get(lookup.chain.keys(tracked.token_ids, first + 1)[first])
        return began is not None and time.monotonic() - began < PATIENCE_WITH_LOADS_S

    def _look_up(self, tracked: Tracked, prompt: list[int]) -> Lookup:
        try:
            return self._ask_store(tracked, prompt)
        except Unidentified as reason:
            return Lookup(None, reason=str(reason))
        except Exception as mistake:
            log.error("a look-up failed: %s", type(mistake).__name__, exc_info=True)
            self._records.count({"faults": 1})
            return Lookup(None, reason="fault")

    def _ask_store(self, tracked: Tracked, prompt: list[int]) -> Lookup:
        began = self._clock()
        namespace = self._namespace_of(tracked.salt, tracked.adapter_path)
        chain = Chain(namespace, self._geometry.chunk_tokens, tracked.media or ())
        keys = chain.keys(prompt, len(prompt) // self._geometry.chunk_tokens)
        if not self._may_load:
            return Lookup(chain, reason="role")
        if not self._switch.on:
            return Lookup(chain, reason=SWITCHED_OFF)
        if not keys:
            return Lookup(chain, reason="shorter_than_a_chunk")
        # What the first rank holds is a hint for all of them; each finds out for itself.
        names = [rank_key(key, 0, self._geometry.ranks) for key in keys]
        found = self._store.lookup(namespace, names, self._geometry.shape)
        return Lookup(chain, found, ms=(self._clock() - began) * 1000)

    # --- as it is scheduled ------------------------------------------------------------------------------------------

    def allocated(self, request: Any, block_ids: Iterable[int], external_tokens: int) -> None:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        tracked.block_ids = list(block_ids)
        if external_tokens > 0:
            self._loads.append(self._load(tracked, external_tokens))

    def _load(self, tracked: Tracked, tokens: int) -> Load:
        lookup = tracked.looked_up()
        assert lookup is not None and lookup.chain is not None and lookup.found is not None, "a load without a lookup"
        size, per_chunk = self._geometry.block_size_tokens, self._geometry.chunk_blocks
        first, last = tracked.local_tokens // size, (tracked.local_tokens + tokens) // size
        first_chunk, last_chunk = first // per_chunk, -(-last // per_chunk)
        keys = lookup.chain.keys(tracked.token_ids, last_chunk)
        chunks = []
        for chunk in range(first_chunk, last_chunk):
            blocks = range(chunk * per_chunk, (chunk + 1) * per_chunk)
            ids = tuple(tracked.block_ids[i] if first <= i < last else None for i in blocks)
            first_token = chunk * self._geometry.chunk_tokens
            places = lookup.found.places[chunk] if chunk < lookup.found.chunks else ()
            chunks.append(ChunkLoad(keys[chunk], first_token, ids, places))
        tracked.saved_chunks = max(tracked.saved_chunks, last // per_chunk)
        load = Load(tracked.request.request_id, lookup.chain.namespace, tuple(chunks), time.monotonic())
        tracked.load = load
        self._coming.update((chunk.key, load.ordered_s) for chunk in chunks)
        return load

    def orders(self, step: Iterable[Scheduled]) -> StepOrders:
        """What the worker has to do with this step. Takes what was ordered since the last one: a load that got lost on
        the way would keep its request waiting for ever, so whatever happens to saves, loads go out."""
        loads, self._loads = tuple(self._loads), []
        try:
            return StepOrders(loads, tuple(self._saves_of(step)))
        except Exception as mistake:
            log.error("the saves of a step failed: %s", type(mistake).__name__, exc_info=True)
            self._records.count({"faults": 1})
            return StepOrders(loads)

    def _saves_of(self, step: Iterable[Scheduled]) -> list[Save]:
        saves: list[Save] = []
        for scheduled in step:
            tracked = self._tracked.get(scheduled.request_id)
            if tracked is None:
                continue
            if scheduled.replaces_blocks:
                tracked.block_ids = list(scheduled.block_ids)
            else:
                tracked.block_ids += scheduled.block_ids
            self._time_prefill(tracked, scheduled)
            if self._may_save and self._switch.on:
                saves += self._due(tracked, scheduled.computed_tokens + scheduled.new_tokens)
        if saves:
            self._saving += len(saves)
            self._saving_since = self._clock()
        return saves

    @property
    def saves_under_way(self) -> bool:
        """Whether the engine should go on stepping to hear how they end; not for ever, should a worker lose count."""
        return self._saving > 0 and self._clock() - self._saving_since < PATIENCE_WITH_SAVES_S

    def _due(self, tracked: Tracked, computed_tokens: int) -> list[Save]:
        """Chunks that are complete after this step and have not been saved."""
        lookup = tracked.looked_up()
        if lookup is None or lookup.chain is None:
            return []  # a later step makes up for it, while the request runs
        known_tokens = len(tracked.token_ids) if self._save_generated else tracked.request.num_prompt_tokens
        size, per_chunk = self._geometry.chunk_tokens, self._geometry.chunk_blocks
        complete = min(computed_tokens, known_tokens) // size
        in_store = 0 if lookup.found is None or tracked.failed else lookup.found.chunks
        first = max(tracked.saved_chunks, in_store)
        if complete <= first:
            return []
        keys = lookup.chain.keys(tracked.token_ids, complete)
        saves = []
        for chunk in range(first, complete):
            ids = tuple(tracked.block_ids[chunk * per_chunk : (chunk + 1) * per_chunk])
            if len(ids) == per_chunk and self._first_time(keys[chunk]):
                saves.append(Save(lookup.chain.namespace, keys[chunk], chunk * size, ids))
        tracked.saved_chunks = complete
        return saves

    def _first_time(self, key: bytes) -> bool:
        """Whether to save it. What was saved before, and is not found now, was evicted since, unless that is so short
        ago that the save may still be under way. A producer looks nothing up and saves once."""
        now, saved_at = self._clock(), self._saved.pop(key, None)
        again = saved_at is None or (self._may_load and now - saved_at >= SAVE_AGAIN_AFTER_S)
        self._saved[key] = now if again or saved_at is None else saved_at
        if len(self._saved) > REMEMBERED_KEYS:
            self._saved.popitem(last=False)
        return again

    def _time_prefill(self, tracked: Tracked, scheduled: Scheduled) -> None:
        """From the step that begins a prompt to the step after the one that ends it."""
        now, prompt = self._clock(), tracked.request.num_prompt_tokens
        if scheduled.computed_tokens < prompt and tracked.prefill_began_at is None:
            tracked.prefill_began_at, tracked.prefill_tokens = now, prompt - scheduled.computed_tokens
        elif scheduled.computed_tokens >= prompt and tracked.prefill_tokens > 0:
            assert tracked.prefill_began_at is not None
            self._store.observe_prefill(tracked.prefill_tokens, (now - tracked.prefill_began_at) * 1000)
            tracked.prefill_tokens = 0

    # --- after a step ------------------------------------------------------------------------------------------------

    def reported(self, reports: StepReports) -> None:
        for request_id, report in reports.loads.items():
            gone = self._gone.pop(request_id, None)
            tracked = self._tracked.get(request_id, gone)
            if tracked is None:
                continue
            tracked.reports.append(report)
            assert tracked.load is not None
            for chunk in tracked.load.chunks:
                self._coming.pop(chunk.key, None)
            self._store.observe_fetch(report.bytes_by_tier, report.ms_by_tier)
            if report.outcome != HIT:
                self._load_failed(tracked, report.outcome)
            if gone is not None:
                self._records.add(gone.record(self._geometry.block_size_tokens))
        self._saving = max(0, self._saving - sum(reports.saves.values()))
        for key in reports.unsaved:
            self._saved.pop(key, None)
        amounts = {f"saves_{outcome}": count for outcome, count in reports.saves.items()}
        self._records.count({**amounts, "written_bytes": reports.saved_bytes, "faults": reports.faults})

    def _load_failed(self, tracked: Tracked, outcome: str) -> None:
        """What did not come will be computed, and may then be saved over what is broken or missing there."""
        tracked.failed, tracked.reason = True, outcome
        assert tracked.load is not None
        lost = tracked.load.chunks[tracked.reports[-1].chunks :]
        for chunk in lost:
            self._saved.pop(chunk.key, None)
        tracked.saved_chunks = min(tracked.saved_chunks, lost[0].first_token // self._geometry.chunk_tokens)

    def finished(self, request: Any) -> LoadRecord | None:
        """Forgets the request. None: its load is still under way; the record is made when that is over."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return None
        if tracked.awaits_report:
            self._gone[request.request_id] = tracked
            return None
        record = tracked.record(self._geometry.block_size_tokens)
        self._records.add(record)
        return record

    def forget_saved(self) -> None:
        """After a reset: what was saved before may be saved again."""
        self._saved.clear()

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._store.close()
