"""The worker's metrics page: vLLM's names and labels for what the mock models, and its own under `kvrelay_mock_`.

Written by hand rather than with a client library: it is a page of text, and the worker must start quickly.
"""

from __future__ import annotations

import bisect
import resource
from collections.abc import Iterable, Mapping

from kvrelay.core.engine.engine import Admitted, Engine, Finished, StepStarted
from kvrelay.edge.worker.spec import MockSpec

_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
KIB_BYTES = 1024


class Histogram:
    """Cumulative buckets as Prometheus wants them."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str, labels: str) -> Iterable[str]:
        cumulative = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            cumulative += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {cumulative}'
        yield f"{name}_sum{{{labels}}} {self._sum:.9g}"
        yield f"{name}_count{{{labels}}} {cumulative}"


class WorkerMetrics:
    """Counts what the engine does; an `EngineObserver`."""

    def __init__(self, spec: MockSpec, engine: Engine, *, incarnation: str, started_wall_s: float) -> None:
        self._engine = engine
        self._spec = spec
        self._incarnation = incarnation
        self._started_wall_s = started_wall_s
        self._last_token_s: dict[str, float] = {}
        self._submitted_s: dict[str, float] = {}
        self.finished = {"stop": 0, "length": 0, "abort": 0, "error": 0, "repetition": 0}
        self.steps = 0
        self.preemptions = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.wrong_reuse_blocks = 0
        self.refused_requests = 0
        self.client_aborts = 0
        self.ttft = Histogram(_SECONDS)
        self.itl = Histogram(_SECONDS)
        self.e2e = Histogram(_SECONDS)
        self.queue = Histogram(_SECONDS)
        self.prefill = Histogram(_SECONDS)
        self.decode = Histogram(_SECONDS)
        self.request_prompt = Histogram(_TOKENS)
        self.request_generation = Histogram(_TOKENS)
        self.iteration = Histogram(_TOKENS)

    # --- what the engine host and the API call -----------------------------------------------------------------------

    def on_submitted(self, request_id: str, now_s: float) -> None:
        self._submitted_s[request_id] = now_s

    def on_step(self, started: StepStarted) -> None:
        self.steps += 1
        self.iteration.observe(started.prefill_tokens + started.decode_requests)

    def on_admitted(self, admitted: Admitted) -> None:
        self.prompt_tokens += admitted.prompt_tokens
        self.cached_tokens += admitted.cached_tokens
        self.wrong_reuse_blocks += admitted.wrong_reuse_blocks
        self.queue.observe(admitted.queue_s)

    def on_preempted(self) -> None:
        self.preemptions += 1

    def on_token(self, request_id: str, now_s: float) -> None:
        self.generation_tokens += 1
        last_s = self._last_token_s.get(request_id)
        if last_s is not None:
            self.itl.observe(now_s - last_s)
        elif request_id in self._submitted_s:
            self.ttft.observe(now_s - self._submitted_s[request_id])
        self._last_token_s[request_id] = now_s

    def on_finished(self, finished: Finished, now_s: float) -> None:
        """vLLM's success counter leaves out requests whose client left; so does this one."""
        self._last_token_s.pop(finished.request_id, None)
        submitted_s = self._submitted_s.pop(finished.request_id, None)
        if finished.reason == "abort":
            return
        self.finished[finished.reason] += 1
        self.request_prompt.observe(finished.prompt_tokens)
        self.request_generation.observe(finished.output_tokens)
        if submitted_s is not None:
            self.e2e.observe(now_s - submitted_s)
        if finished.prefill_s is not None:
            self.prefill.observe(finished.prefill_s)
        if finished.decode_s is not None:
            self.decode.observe(finished.decode_s)

    # --- the page ----------------------------------------------------------------------------------------------------

    def render(self, *, events_sent: int, events_withheld: int) -> bytes:
        lines: list[str] = []
        self._add_gauges(lines)
        self._add_counters(lines)
        self._add_histograms(lines)
        self._add_process(lines)
        self._add_own(lines, events_sent=events_sent, events_withheld=events_withheld)
        return ("\n".join(lines) + "\n").encode()

    @property
    def _labels(self) -> str:
        return f'engine="0",model_name="{_escape(self._spec.model)}"'

    def _add_gauges(self, lines: list[str]) -> None:
        engine, labels = self._engine, self._labels
        _add(lines, "vllm:num_requests_running", "gauge", {labels: engine.running_requests})
        _add(lines, "vllm:num_requests_waiting", "gauge", {labels: engine.waiting_requests})
        waiting = {
            f'{labels},reason="capacity"': engine.waiting_requests,
            f'{labels},reason="deferred"': 0,
        }
        _add(lines, "vllm:num_requests_waiting_by_reason", "gauge", waiting)
        _add(lines, "vllm:kv_cache_usage_perc", "gauge", {labels: engine.kv_usage_ratio})
        config = {
            "block_size": self._spec.block_size_tokens,
            "num_gpu_blocks": self._spec.blocks,
            "kv_cache_size_tokens": self._spec.capacity_tokens,
            "enable_prefix_caching": True,
            "prefix_caching_hash_algo": "kvrelay-mock",
        }
        config_labels = ",".join(f'{name}="{value}"' for name, value in config.items())
        _add(lines, "vllm:cache_config_info", "gauge", {f'engine="0",{config_labels}': 1})

    def _add_counters(self, lines: list[str]) -> None:
        labels = self._labels
        computed = self.prompt_tokens - self.cached_tokens
        counters = {
            "prefix_cache_queries": {labels: self.prompt_tokens},
            "prefix_cache_hits": {labels: self.cached_tokens},
            "prompt_tokens": {labels: self.prompt_tokens},
            "prompt_tokens_by_source": {
                f'{labels},source="local_compute"': computed,
                f'{labels},source="local_cache_hit"': self.cached_tokens,
                f'{labels},source="external_kv_transfer"': 0,
            },
            "prompt_tokens_cached": {labels: self.cached_tokens},
            "prompt_tokens_cached_by_source": {f'{labels},source="device"': self.cached_tokens},
            "generation_tokens": {labels: self.generation_tokens},
            "request_success": {
                f'{labels},finished_reason="{reason}"': count for reason, count in self.finished.items()
            },
            "num_preemptions": {labels: self.preemptions},
        }
        for name, samples in counters.items():
            _add(lines, f"vllm:{name}_total", "counter", samples)

    def _add_histograms(self, lines: list[str]) -> None:
        histograms = {
            "time_to_first_token_seconds": self.ttft,
            "inter_token_latency_seconds": self.itl,
            "e2e_request_latency_seconds": self.e2e,
            "request_queue_time_seconds": self.queue,
            "request_prefill_time_seconds": self.prefill,
            "request_decode_time_seconds": self.decode,
            "request_prompt_tokens": self.request_prompt,
            "request_generation_tokens": self.request_generation,
            "iteration_tokens_total": self.iteration,
        }
        for name, histogram in histograms.items():
            lines.append(f"# TYPE vllm:{name} histogram")
            lines.extend(histogram.lines(f"vllm:{name}", self._labels))

    def _add_process(self, lines: list[str]) -> None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        _add(lines, "process_start_time_seconds", "gauge", {"": self._started_wall_s})
        _add(lines, "process_cpu_seconds_total", "counter", {"": usage.ru_utime + usage.ru_stime})
        _add(lines, "process_resident_memory_bytes", "gauge", {"": usage.ru_maxrss * KIB_BYTES})

    def _add_own(self, lines: list[str], *, events_sent: int, events_withheld: int) -> None:
        info = f'name="{_escape(self._spec.name)}",incarnation="{self._incarnation}",models_payload="false"'
        _add(lines, "kvrelay_mock_info", "gauge", {info: 1})
        _add(lines, "kvrelay_mock_wrong_reuse_blocks_total", "counter", {"": self.wrong_reuse_blocks})
        _add(lines, "kvrelay_mock_client_aborts_total", "counter", {"": self.client_aborts})
        _add(lines, "kvrelay_mock_refused_requests_total", "counter", {"": self.refused_requests})
        _add(lines, "kvrelay_mock_steps_total", "counter", {"": self.steps})
        _add(lines, "kvrelay_mock_event_batches_total", "counter", {"": events_sent})
        _add(lines, "kvrelay_mock_event_batches_withheld_total", "counter", {"": events_withheld})


def _add(lines: list[str], name: str, kind: str, samples: Mapping[str, float]) -> None:
    lines.append(f"# TYPE {name} {kind}")
    for labels, value in samples.items():
        lines.append(f"{name}{{{labels}}} {value}" if labels else f"{name} {value}")


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
