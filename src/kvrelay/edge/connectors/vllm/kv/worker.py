"""The connector's half in the worker's process: moves bytes between the engine's paged memory and the store.

Loads run in threads and never inside a step: the engine keeps their requests waiting and serves others. A chunk is
copied into the paged memory only after all of it was verified; the first chunk that fails ends its load, what came
before stays, and the blocks from there on are reported as failed, so that the engine's own policy applies.

Saves are copied out of the paged memory within the step, layer by layer as the layers are computed, because afterwards
its blocks may be used for something else; the store gets them from the copies, in threads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kvrelay.edge.connectors.vllm.kv.chain import rank_key
from kvrelay.edge.connectors.vllm.kv.orders import HIT, ChunkLoad, Load, LoadReport, Save, StepReports
from kvrelay.edge.connectors.vllm.kv.pages import Pages
from kvrelay.edge.connectors.vllm.kv.staging import Staging
from kvrelay.edge.connectors.vllm.kv.store import ChunkStore
from kvrelay.edge.stores.tiered import ChunkShape

FETCHED_TOGETHER = 32  # chunks
NOT_SAVED = "staging_full"
FAULT = "fault"
STORED = frozenset(("stored", "exists", HIT))
log = logging.getLogger(__name__)


class WorkerHalf:
    """Called by the engine's model runner; its threads share nothing with it but what is under the lock."""

    def __init__(
        self,
        *,
        pages: Pages,
        layer_names: Sequence[str],
        shape: ChunkShape,
        staging: Staging,
        store: ChunkStore,
        rank: int,
        ranks: int,
        load_threads: int,
        save_threads: int,
    ) -> None:
        self._pages = pages
        self._layer_of = {name: i for i, name in enumerate(layer_names)}
        self._shape = shape
        self._staging = staging
        self._store = store
        self._rank, self._ranks = rank, ranks
        self._loading = ThreadPoolExecutor(load_threads, thread_name_prefix="kvrelay-load")
        self._saving = ThreadPoolExecutor(save_threads, thread_name_prefix="kvrelay-save")
        self._lock = threading.Lock()
        self._ended: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._reports = StepReports()
        self._step: list[tuple[Save, int]] = []  # saves of this step and their slots
        self._copied: Counter[int] = Counter()  # layers that are out of the paged memory, by position in `_step`

    # --- loads -------------------------------------------------------------------------------------------------------

    def begin_loads(self, loads: Sequence[Load]) -> None:
        """Every load that is ordered ends in `take_ended`, or its request would wait for ever."""
        for load in loads:
            try:
                self._loading.submit(self._run_load, load)
            except RuntimeError:  # no more threads
                self._end_load(load, LoadReport(0, 0, {}, FAULT))

    def _run_load(self, load: Load) -> None:
        try:
            report = self._load(load)
        except Exception as mistake:
            log.error("loading KV failed: %s", type(mistake).__name__, exc_info=True)
            report = LoadReport(0, 0, {}, FAULT)
        self._end_load(load, report)

    def _end_load(self, load: Load, report: LoadReport) -> None:
        failed = {block for chunk in load.chunks[report.chunks :] for block in chunk.block_ids if block is not None}
        with self._lock:
            self._failed_blocks |= failed
            self._reports.loads[load.request_id] = report
            self._reports.faults += report.outcome == FAULT
            self._ended.add(load.request_id)

    def _load(self, load: Load) -> LoadReport:
        began = time.monotonic()
        report = LoadReport(0, 0, {"queue": (began - load.ordered_s) * 1000}, HIT)
        while report.chunks < len(load.chunks) and report.outcome == HIT:
            rest = load.chunks[report.chunks : report.chunks + FETCHED_TOGETHER]
            with self._staging.taking(len(rest)) as slots:
                self._fetch(load, rest[: len(slots)], slots, report)
        report.ms["total"] = (time.monotonic() - load.ordered_s) * 1000
        return report

    def _fetch(self, load: Load, chunks: Sequence[ChunkLoad], slots: Sequence[int], report: LoadReport) -> None:
        keys = [rank_key(chunk.key, self._rank, self._ranks) for chunk in chunks]
        into = [self._staging.bytes_of(slot) for slot in slots]
        fetched = self._store.fetch(load.namespace, keys, [chunk.places for chunk in chunks], self._shape, into)
        began = time.monotonic()
        good = 0
        while good < len(chunks) and fetched.outcomes[good] == HIT:
            good += 1
        if good < len(chunks):
            report.outcome = fetched.outcomes[good]
        for chunk, slot in zip(chunks[:good], slots, strict=False):
            self._into_pages(chunk, slot)
        self._pages.finish()
        report.chunks += good
        report.scopes += fetched.scopes[:good]
        report.bytes_read += good * self._staging.chunk_bytes
        for step, value in {"fetch": fetched.ms, "copy": (time.monotonic() - began) * 1000}.items():
            report.ms[step] = report.ms.get(step, 0.0) + value
        for tier, moved in fetched.bytes_by_tier.items():
            report.bytes_by_tier[tier] = report.bytes_by_tier.get(tier, 0) + moved
            report.ms_by_tier[tier] = report.ms_by_tier.get(tier, 0.0) + fetched.ms_by_tier[tier]

    def _into_pages(self, chunk: ChunkLoad, slot: int) -> None:
        wanted = [i for i, block in enumerate(chunk.block_ids) if block is not None]
        first, last = wanted[0], wanted[-1] + 1  # blocks that are wanted follow each other
        ids = [block for block in chunk.block_ids if block is not None]
        rows = self._staging.rows(slot)
        for layer in range(self._pages.layers):
            self._pages.scatter(layer, ids, rows[layer, first:last])

    # --- saves -------------------------------------------------------------------------------------------------------

    def begin_saves(self, saves: Sequence[Save]) -> None:
        """Takes slots for what this step will complete."""
        self._copied.clear()
        for save in saves:
            slot = self._staging.try_take()
            if slot is None:
                self._note_save(NOT_SAVED, save)
            else:
                self._step.append((save, slot))

    def layer_computed(self, layer_name: str) -> None:
        layer = self._layer_of.get(layer_name)
        if layer is not None:
            self._copy_layer(layer)

    def _copy_layer(self, layer: int) -> None:
        for position, (save, slot) in enumerate(self._step):
            self._pages.gather(layer, save.block_ids, self._staging.rows(slot)[layer])
            self._copied[position] |= 1 << layer

    def step_computed(self) -> None:
        """Copies what the hooks of single layers have not: a compiled model may not call them. Then threads write."""
        if not self._step:
            return
        everything = (1 << self._pages.layers) - 1
        for position, (save, slot) in enumerate(self._step):
            for layer in range(self._pages.layers):
                if not self._copied[position] >> layer & 1:
                    self._pages.gather(layer, save.block_ids, self._staging.rows(slot)[layer])
            self._copied[position] = everything
        self._pages.finish()
        step, self._step = self._step, []
        for save, slot in step:
            self._saving.submit(self._run_save, save, slot)

    def _run_save(self, save: Save, slot: int) -> None:
        try:
            key = rank_key(save.key, self._rank, self._ranks)
            payload = self._staging.bytes_of(slot)
            outcome = self._store.save(save.namespace, key, self._shape, payload, first_token=save.first_token)
        except Exception as mistake:
            log.error("saving KV failed: %s", type(mistake).__name__, exc_info=True)
            outcome = FAULT
        finally:
            self._staging.give_back(slot)
        self._note_save(outcome, save)

    def _note_save(self, outcome: str, save: Save) -> None:
        with self._lock:
            reports = self._reports
            reports.saves[outcome] = reports.saves.get(outcome, 0) + 1
            reports.faults += outcome == FAULT
            if outcome in STORED:
                reports.saved_bytes += self._staging.chunk_bytes
            else:
                reports.unsaved += (save.key,)

    # --- what the engine asks after each step ------------------------------------------------------------------------

    def take_ended(self) -> tuple[set[str], set[int]]:
        """Requests whose loads are over, and the blocks that did not come: both in the same step, as they must be."""
        with self._lock:
            ended, self._ended = self._ended, set()
            failed, self._failed_blocks = self._failed_blocks, set()
        return ended, failed

    def take_reports(self) -> StepReports | None:
        with self._lock:
            reports, self._reports = self._reports, StepReports()
        return reports or None

    def close(self) -> None:
        """Lets running saves end; nobody waits for loads any more."""
        self._loading.shutdown(wait=False, cancel_futures=True)
        self._saving.shutdown(wait=True)
        self._store.close()
