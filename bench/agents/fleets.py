"""Two workers to run on: mock processes at the speed of a small model on a CPU core, or real vLLM on CPU."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bench.agents import traffic
from bench.agents.arms import Fleet
from kvrelay.edge.system.ports import spare_port
from kvrelay.edge.worker.launch import MockFleet
from kvrelay.edge.worker.spec import MockSpec

BLOCK_SIZE, BLOCKS = 32, 640
PREFILL_TOKENS_PER_S, DECODE_MS = 1_000.0, 40.0
# A step of vLLM's usual budget, 2,048 tokens, takes a GPU some 50 ms and a CPU core a second, in which nobody else gets
# a token. This one takes a tenth of a second, so that steps are to prompts what they are on the machines that matter.
STEP_TOKENS = 256
PROBE_TOKENS, PROBES = 2_000, 3


@contextmanager
def mock(pace: float) -> Iterator[Fleet]:
    """`pace` times as fast as a CPU core, so that a run is as much shorter."""
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
        yield Fleet("mock", specs[0].model, BLOCK_SIZE, lines, lambda: PREFILL_TOKENS_PER_S * pace)


@contextmanager
def vllm() -> Iterator[Fleet]:
    """Real vLLM with a small model, one core each; installed on first use, as for `make test-real`."""
    from tests.real.engine import MODEL_NAME, VERSION, VllmWorker, installed

    from bench.rig.engines import pair, running

    engine = installed("wide")  # every token of its answers has a text, so that each first one shows
    with tempfile.TemporaryDirectory(prefix="agents-") as folder:

        def make(name: str, cpu: int) -> VllmWorker:
            return VllmWorker(
                engine,
                name,
                port=spare_port(),
                cpu=cpu,
                folder=Path(folder),
                blocks=BLOCKS,
                step_tokens=STEP_TOKENS,
                one_process=True,
            )

        with running(pair(make)) as workers:
            lines = {worker.name: [f"url = {json.dumps(worker.url)}"] for worker in workers}
            label = f"CPU, vLLM {VERSION}, a Llama of 27 M random weights, {STEP_TOKENS} tokens per step"
            yield Fleet(label, MODEL_NAME, BLOCK_SIZE, lines, partial(_rate, [worker.url for worker in workers]))


def _rate(urls: Sequence[str]) -> float:
    """Of prompts that nobody has sent before. The first one of each worker warms it up."""
    from tests.real.engine import prefill

    chance = random.Random()
    prompts = [[traffic.tokens(chance, PROBE_TOKENS).tolist() for _ in range(PROBES + 1)] for _ in urls]

    def computed_in_s(url: str, own: list[list[int]]) -> float:
        prefill(url, own[0])
        began = time.monotonic()
        for prompt in own[1:]:
            prefill(url, prompt)
        return time.monotonic() - began

    with ThreadPoolExecutor(len(urls)) as threads:
        seconds = list(threads.map(computed_in_s, urls, prompts))
    return PROBE_TOKENS * PROBES / statistics.mean(seconds)
