"""The worker's process: reads its spec, serves, and ends when told to or when its parent is gone.

Standard input carries one line of JSON, then stays open: its end means that the parent died, however that happened, and
the worker ends at once. Standard output carries one line when the worker is ready. SIGTERM and SIGINT drain; a second
one does not wait. Imports are kept few: a fleet starts as quickly as its slowest import.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from typing import Any

import msgspec
import uvloop

from kvrelay.edge.worker.faults import FaultError
from kvrelay.edge.worker.spec import MockSpec, spec_problems
from kvrelay.edge.worker.worker import Worker

log = logging.getLogger("kvrelay.mock")

EXIT_OK, EXIT_USAGE, EXIT_OUR_MISTAKE = 0, 2, 70
GC_THRESHOLD = 50_000  # young objects here die by reference count; the collector only costs pauses


def main() -> None:
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=MockSpec)
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format=f"%(asctime)s {spec.name} %(levelname)s %(message)s"
    )
    problems = spec_problems(spec)
    for problem in problems:
        log.error("`%s` is `%s`; legal: %s", problem.member, problem.received, problem.legal)
    if problems:
        sys.exit(EXIT_USAGE)
    sys.exit(uvloop.run(_serve(spec)))


async def _serve(spec: MockSpec) -> int:
    asyncio.get_running_loop().set_exception_handler(_on_loop_exception)
    orders = _Orders()
    try:
        worker = Worker(spec)
        ready = await worker.start()
    except (OSError, FaultError, ValueError) as error:
        log.error("cannot start: %s", error)
        return EXIT_USAGE
    sys.stdout.buffer.write(msgspec.json.encode(ready) + b"\n")
    sys.stdout.buffer.flush()
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    await orders.stop_asked.wait()
    if not orders.at_once.is_set():
        await _drain(worker, orders)
    await worker.stop()
    return EXIT_OK


def _on_loop_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A broken invariant ends the worker: one that limps on would be measured as if it were well."""
    loop.default_exception_handler(context)
    if isinstance(context.get("exception"), AssertionError):
        os._exit(EXIT_OUR_MISTAKE)


async def _drain(worker: Worker, orders: _Orders) -> None:
    draining = asyncio.ensure_future(worker.drain())
    hurried = asyncio.ensure_future(orders.at_once.wait())
    await asyncio.wait((draining, hurried), return_when=asyncio.FIRST_COMPLETED)
    if draining.done() and not draining.result():
        log.warning("drain: the bound of %g s is over, cutting what still runs", worker.spec.drain_s)
    for waiting in (draining, hurried):
        waiting.cancel()


class _Orders:
    """What the outside wants of this process: go on, drain, or end at once."""

    def __init__(self) -> None:
        self.stop_asked = asyncio.Event()
        self.at_once = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        self._watched = sys.stdin.fileno()
        loop.add_reader(self._watched, self._on_parent_pipe)

    def _on_signal(self) -> None:
        if self.stop_asked.is_set():
            self.at_once.set()
        self.stop_asked.set()

    def _on_parent_pipe(self) -> None:
        if os.read(self._watched, 4096):
            return
        asyncio.get_running_loop().remove_reader(self._watched)
        self.at_once.set()
        self.stop_asked.set()


if __name__ == "__main__":
    main()
