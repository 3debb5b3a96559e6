"""Our counters on the engine's own metrics page. Needs vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

_KINDS = {
    "loads_": ("vllm:kvrelay_kv_loads", "Requests by what came of their remote KV.", "outcome"),
    "saves_": ("vllm:kvrelay_kv_saves", "Chunks by what came of saving them.", "outcome"),
}
_PLAIN = {
    "loaded_tokens": ("vllm:kvrelay_kv_loaded_tokens", "Tokens whose KV was verified and used."),
    "planned_tokens": ("vllm:kvrelay_kv_planned_tokens", "Tokens whose KV was to be loaded."),
    "read_bytes": ("vllm:kvrelay_kv_read_bytes", "Bytes of KV that were verified and used."),
    "written_bytes": ("vllm:kvrelay_kv_written_bytes", "Bytes of KV that were stored."),
    "faults": ("vllm:kvrelay_kv_faults", "Mistakes of the connector that were kept from the engine."),
}


@dataclass
class LoadStats(KVConnectorStats):
    """Amounts by name since the last time."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not any(self.data.values())


class _Counters(KVConnectorPromMetrics):
    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._plain = {
            key: self._counter_cls(name=name, documentation=text, labelnames=labelnames)
            for key, (name, text) in _PLAIN.items()
        }
        self._by_kind = {
            prefix: self._counter_cls(name=name, documentation=text, labelnames=[*labelnames, label])
            for prefix, (name, text, label) in _KINDS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for key, amount in transfer_stats_data.items():
            if key in self._plain:
                self._plain[key].labels(*labels).inc(amount)
                continue
            prefix = next((prefix for prefix in self._by_kind if key.startswith(prefix)), None)
            if prefix is not None:
                self._by_kind[prefix].labels(*labels, key.removeprefix(prefix)).inc(amount)


def prometheus_of(vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> _Counters:
    return _Counters(vllm_config, metric_types, labelnames, per_engine_labelvalues)
