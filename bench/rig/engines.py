"""Two real vLLM workers on CPU, one core each, for benches: started and ended together, with their fleet file."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from tests.real.engine import VllmWorker

Worker = TypeVar("Worker", bound=VllmWorker)

SMALL_CUT = (
    "--block-tokens", "4", "--max-turns", "4", "--speed", "40",
    "--max-gap-ms", "1500", "--max-output-tokens", "4", "--max-context-tokens", "32000",
)  # fmt: skip
"""Of a replayed trace, small enough for one core a worker: 4 tokens stand for a block, a minute for two seconds."""


def pair(make: Callable[[str, int], Worker]) -> list[Worker]:
    """`make` gets the name and the core."""
    return [make(name, cpu) for cpu, name in enumerate("ab")]


@contextmanager
def running(workers: Sequence[Worker]) -> Iterator[Sequence[Worker]]:
    """All of them up, and none of them left afterwards, also when this process is told to end."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.wait_until_up()
        yield workers
    finally:
        for worker in workers:
            worker.kill()
        signal.signal(signal.SIGTERM, before)


def write_fleet(workers: Sequence[VllmWorker], model: Path, folder: Path) -> Path:
    """For `kvrelay replay --fleet`."""
    tables = [f"[[workers]]\nname = {json.dumps(one.name)}\nurl = {json.dumps(one.url)}\n" for one in workers]
    file = folder / "fleet.toml"
    file.write_text("\n".join([*tables, f"[model]\npath = {json.dumps(str(model))}\n"]), encoding="utf-8")
    return file
