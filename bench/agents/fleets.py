"""Two workers to run on: mock processes at the speed of a small model on a CPU core, or real vLLM on CPU."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.agents.arms import Fleet
from kvrelay.edge.system.ports import spare_port
from kvrelay.edge.worker.launch import MockFleet
from kvrelay.edge.worker.spec import MockSpec

BLOCK_SIZE, BLOCKS = 32, 640
PREFILL_TOKENS_PER_S, DECODE_MS = 1_000.0, 40.0


@contextmanager
def mock(pace: float) -> Iterator[Fleet]:
    """`pace` times as fast, so that a run is as much shorter."""
    specs = [
        MockSpec(
            name=name,
            block_size_tokens=BLOCK_SIZE,
            blocks=BLOCKS,
            prefill_tokens_per_s=PREFILL_TOKENS_PER_S * pace,
            decode_ms=DECODE_MS / pace,
        )
        for name in "ab"
    ]
    with MockFleet(specs) as fleet:
        lines = {
            worker.name: [
                f"url = {json.dumps(worker.url)}",
                'adapter = "mock"',
                f"events = {json.dumps(worker.events)}",
                f"replay = {json.dumps(worker.replay)}",
            ]
            for worker in fleet.workers
        }
        yield Fleet("mock", specs[0].model, BLOCK_SIZE, lines)


@contextmanager
def vllm() -> Iterator[Fleet]:
    """Real vLLM with a small model, one core each; installed on first use, as for `make test-real`."""
    from tests.real.engine import MODEL_NAME, VERSION, VllmWorker, installed

    from bench.rig.engines import pair, running

    engine = installed("small")
    with tempfile.TemporaryDirectory(prefix="agents-") as folder:

        def make(name: str, cpu: int) -> VllmWorker:
            return VllmWorker(engine, name, port=spare_port(), cpu=cpu, folder=Path(folder), blocks=BLOCKS)

        with running(pair(make)) as workers:
            lines = {worker.name: [f"url = {json.dumps(worker.url)}"] for worker in workers}
            yield Fleet(f"CPU, vLLM {VERSION}, a Llama of 7 M random weights", MODEL_NAME, BLOCK_SIZE, lines)
