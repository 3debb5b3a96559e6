"""vLLM's connector interface, over our two halves. This module needs vLLM and torch; it is imported by the engine only:

    --kv-transfer-config '{"kv_connector": "KvrelayConnector",
                           "kv_connector_module_path": "kvrelay.edge.connectors.vllm.kv.connector",
                           "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                           "kv_connector_extra_config": {"config": "/etc/kvrelay.toml"}}'

The engine makes one instance for its scheduler and one in each worker process. An exception that left one of these
methods would end the engine, so none does: each is guarded, answers as if there were nothing in the store, and is
counted.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvrelay.edge.connectors.vllm.kv.facts import MemoryFacts
from kvrelay.edge.connectors.vllm.kv.orders import LoadReport, StepOrders, StepReports
from kvrelay.edge.connectors.vllm.kv.scheduler import Scheduled
from kvrelay.edge.connectors.vllm.kv.settings import read_settings
from kvrelay.edge.connectors.vllm.kv.setup import SchedulerSide, WorkerSide, scheduler_side, worker_side
from kvrelay.edge.connectors.vllm.kv.stats import LoadStats, prometheus_of

Method = TypeVar("Method", bound=Callable[..., Any])
log = logging.getLogger(__name__)


@dataclass
class Orders(KVConnectorMetadata):
    step: StepOrders


@dataclass
class Reports(KVConnectorWorkerMetadata):
    step: StepReports

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Reports:
        assert isinstance(other, Reports)
        return Reports(self.step.joined(other.step))


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    memory: MemoryFacts


def guarded(otherwise: Callable[[], Any]) -> Callable[[Method], Method]:
    """Whatever goes wrong inside, the engine gets `otherwise()`. The text of the mistake may quote a prompt: only its
    kind and place are logged."""

    def guard(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: KvrelayConnector, *args: Any, **more: Any) -> Any:
            try:
                return method(self, *args, **more)
            except Exception as mistake:
                self.faults += 1
                frame = mistake.__traceback__
                while frame is not None and frame.tb_next is not None:
                    frame = frame.tb_next
                where = "?" if frame is None else f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}"
                log.error("kvrelay: %s failed with %s at %s", method.__name__, type(mistake).__name__, where)
                return otherwise()

        return cast(Method, call)

    return guard


class KvrelayConnector(KVConnectorBase_V1):
    """Loads KV that another worker computed, or this one in an earlier life, and saves what this one computes."""

    _cache_hit_source = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Settings that cannot be used stop the engine's start, with a message; nothing later does."""
        super().__init__(vllm_config, role, kv_cache_config)
        self.faults = 0
        self._settings = read_settings(self._kv_transfer_config.kv_connector_extra_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._memory: MemoryFacts | None = None
        self._failed_blocks: set[int] = set()
        self._refused: set[str] = set()
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = scheduler_side(vllm_config, kv_cache_config, self._settings)

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that does not happen is a later miss, nothing more."""
        return False

    # --- scheduler's process -----------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self._meet(metadata)

    @guarded(lambda: None)
    def _meet(self, metadata: dict[tuple[int, int], Any]) -> None:
        assert self._scheduler is not None
        self._scheduler.meet([metadata[rank].memory for rank in sorted(metadata)])

    @guarded(lambda: None)
    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.half.arrived(request)

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        tokens = self._scheduler.half.matched(request, num_computed_tokens)
        return tokens, bool(tokens)

    @guarded(lambda: None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        self._scheduler.half.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        return Orders(self._orders(scheduler_output))

    @guarded(StepOrders)
    def _orders(self, scheduler_output: Any) -> StepOrders:
        assert self._scheduler is not None
        return self._scheduler.half.orders(_scheduled(scheduler_output))

    @guarded(lambda: None)
    def update_connector_output(self, connector_output: Any) -> None:
        reports = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(reports, Reports):
            self._scheduler.half.reported(reports.step)

    @guarded(lambda: False)
    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.half.saves_under_way

    @guarded(lambda: (False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        return False, self._scheduler.finished(request)

    @guarded(lambda: False)
    def reset_cache(self) -> bool | None:
        """What is stored stays: it is named by what it is. Files are read again, in case they were replaced."""
        assert self._scheduler is not None
        self._scheduler.reset()
        return True

    # --- a worker's process ------------------------------------------------------------------------------------------

    @guarded(lambda: None)
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._worker = worker_side(self._vllm_config, kv_caches, self._settings)
        self._memory = self._worker.memory

    def get_handshake_metadata(self) -> Handshake | None:
        return None if self._memory is None else Handshake(self._memory)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The one call that always comes before the layers of a step are computed."""
        super().bind_connector_metadata(connector_metadata)
        self._begin_saves(connector_metadata)

    @guarded(lambda: None)
    def _begin_saves(self, orders: KVConnectorMetadata) -> None:
        if self._worker is not None and isinstance(orders, Orders):
            self._worker.half.begin_saves(orders.step.saves)

    @guarded(lambda: None)
    def start_load_kv(self, forward_context: Any, **more: Any) -> None:
        orders = self._connector_metadata
        if not isinstance(orders, Orders):
            return
        if self._worker is not None:
            self._worker.half.begin_loads(orders.step.loads)
            return
        for load in orders.step.loads:  # our memory was refused; without an end these requests would wait for ever
            self._refused.add(load.request_id)
            self._failed_blocks |= {block for chunk in load.chunks for block in chunk.block_ids if block is not None}

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request is scheduled only after its load is over."""

    @guarded(lambda: None)
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **more: Any) -> None:
        if self._worker is not None:
            self._worker.half.layer_computed(layer_name)

    @guarded(lambda: None)
    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.half.step_computed()

    @guarded(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, self._refused or None
        ended, failed = self._worker.half.take_ended()
        self._failed_blocks |= failed
        return None, ended or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    @guarded(lambda: None)
    def build_connector_worker_meta(self) -> Reports | None:
        if self._worker is not None:
            reports = self._worker.half.take_reports()
            return None if reports is None else Reports(reports)
        refused, self._refused = self._refused, set()
        return (
            Reports(StepReports(loads={name: LoadReport(0, 0, {}, "refused") for name in refused})) if refused else None
        )

    # --- both ---------------------------------------------------------------------------------------------------------

    @guarded(lambda: None)
    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()

    @guarded(lambda: None)
    def get_kv_connector_stats(self) -> LoadStats | None:
        if self._scheduler is None:
            return None
        if self.faults:
            self._scheduler.records.count({"faults": self.faults})
            self.faults = 0
        since = self._scheduler.records.take_since()
        return LoadStats(data=since) if since else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> LoadStats:
        return LoadStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> Any:
        return prometheus_of(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _scheduled(output: Any) -> list[Scheduled]:
    """The engine's step in our words."""
    guesses = output.scheduled_spec_decode_tokens or {}
    tokens = {name: count - len(guesses.get(name, ())) for name, count in output.num_scheduled_tokens.items()}
    step = [
        Scheduled(new.req_id, new.num_computed_tokens, tokens.get(new.req_id, 0), tuple(new.block_ids[0]), True)
        for new in output.scheduled_new_reqs
    ]
    cached = output.scheduled_cached_reqs
    for i, name in enumerate(cached.req_ids):
        blocks = cached.new_block_ids[i]
        ids = () if blocks is None else tuple(blocks[0])
        step.append(
            Scheduled(name, cached.num_computed_tokens[i], tokens.get(name, 0), ids, name in cached.resumed_req_ids)
        )
    return step
