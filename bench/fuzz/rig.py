"""A gateway and its workers in this process, watched: errors in the log or the loop, and what stays open afterwards."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from bench.fuzz.answers import MAD, SANE, Plan, answer_as_planned
from bench.fuzz.echo import EchoWorker
from kvrelay.edge.gateway.gateway import Gateway
from kvrelay.edge.observe.ui.app import STREAM_PATH
from kvrelay.edge.system.config import load_config

TIMEOUT_S = 5.0  # longer than a busy machine holds anybody up, shorter than what counts as hanging
START_S = 10.0
QUIET_S = 10.0


class Watched(logging.Handler):
    """Collects what must not happen: errors that are logged, and exceptions that nobody took."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.errors.append(logging.Formatter("%(name)s: %(message)s").format(record))

    def on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        text = logging.Formatter().formatException((type(error), error, error.__traceback__)) if error else ""
        self.errors.append(f"loop: {context.get('message')}\n{text}")


class Rig:
    """What the cases use. `admin_routes` are all paths of the admin port, with their placeholders.

    `problem()` names anything that went wrong unseen since the last question.
    """

    def __init__(
        self, gateway: Gateway, workers: Sequence[EchoWorker], watched: Watched, admin_routes: list[str]
    ) -> None:
        self.gateway = gateway
        self.admin_routes = admin_routes
        self.plans: dict[bytes, Plan] = {}
        self._workers = workers
        for worker in workers:
            worker.planner = partial(answer_as_planned, self.plans)
        self._watched = watched

    @property
    def port(self) -> int:
        return int(self.gateway.url.rpartition(":")[2])

    @property
    def admin_port(self) -> int:
        return int(self.gateway.admin_url.rpartition(":")[2])

    def problem(self) -> tuple[str, str] | None:
        """(promise, what was observed)."""
        taken = [("no error in the gateway", each) for each in self._watched.errors]
        self._watched.errors.clear()
        for worker in self._workers:
            taken += [("workers get well-formed requests only", each) for each in worker.complaints]
            taken += [("no hidden request reaches a worker", repr(each)) for each in worker.smuggled]
            worker.complaints.clear()
            worker.smuggled.clear()
        return taken[0] if taken else None

    async def leftovers(self) -> str | None:
        """What is still open although nobody asks for anything any more; None when all is quiet in time."""
        try:
            async with asyncio.timeout(QUIET_S):
                while self._open():  # noqa: ASYNC110  there is no one event to wait for
                    await asyncio.sleep(0.02)
        except TimeoutError:
            return repr(self._open())
        return None

    def _open(self) -> dict[str, int]:
        said = self.gateway.describe()
        names = ("client_connections", "open_requests", "open_upstream_calls")
        counts = {name: int(said[name]) for name in names}
        for worker in self.gateway.status().workers:
            for target in worker.targets:
                counts["active_requests"] = counts.get("active_requests", 0) + target.active_requests
        return {name: count for name, count in counts.items() if count}


@asynccontextmanager
async def rig(**more: object) -> AsyncIterator[Rig]:
    watched = Watched()
    workers = [EchoWorker(name) for name in (SANE, MAD)]
    for worker in workers:
        await worker.start()
    settings: dict[str, object] = {
        "workers": [
            {"name": worker.name, "url": worker.url, "adapter": "openai" if worker.name == SANE else "vllm"}
            for worker in workers
        ],
        "gateway.port": 0,
        "gateway.admin_port": 0,
        "gateway.limits.body_bytes": 2**20,
        "gateway.limits.header_bytes": 2**14,
        "gateway.timeouts.first_byte_s": TIMEOUT_S,
        "gateway.timeouts.idle_s": TIMEOUT_S,
        "health.interval_s": 1.0,
        "health.failures": 1000,
        **more,
    }
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    loop.set_exception_handler(watched.on_loop_error)
    logging.getLogger().addHandler(watched)
    try:
        async with Gateway(load_config(Path("/dev/null"), {}, settings), seed=1, key_seed=b"fuzz") as gateway:
            async with asyncio.timeout(START_S):
                while not all(each.routable for each in gateway.status().workers):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            yield Rig(gateway, workers, watched, await _admin_routes(gateway.admin_url))
    finally:
        for worker in workers:
            await worker.stop()
        logging.getLogger().removeHandler(watched)
        loop.set_exception_handler(before)


async def _admin_routes(url: str) -> list[str]:
    """Asked of the gateway itself, so that new routes are tried as well: it names them to who asks for none of them."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/nothing") as response:
        message: str = (await response.json())["error"]["message"]
    return [path for path in message.partition("paths: ")[2].split(", ") if path != STREAM_PATH]  # it has no end
