"""Where scenarios are played: a real gateway over mock worker processes, in calm or with five faults in a hundred.

A calm stage lets a scenario check its own promise. A faulty one has the same traffic, other clients besides, and faults
of every kind that a worker can have without dying; what must hold then is the same for all scenarios (`judge.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from kvrelay.core.receipts.receipt import Receipt
from kvrelay.edge.gateway.gateway import Gateway
from kvrelay.edge.system.config import load_config
from kvrelay.edge.worker.launch import MockFleet, RunningWorker
from kvrelay.edge.worker.spec import MockSpec
from tests.edge.gateway.scripted import receipts, until
from tests.scenarios.client import COMPLETIONS, Client, Seen

WORKERS = 4
SEED = 23
SPECS = [
    MockSpec(name=f"w{number}", prefill_tokens_per_s=50_000.0, decode_ms=1.0, seed=SEED + number, adapters=("ad-x",))
    for number in range(WORKERS)
]
PATIENCE_S = 20.0

# Five requests in a hundred.
FAULTS: tuple[dict[str, Any], ...] = (
    {"kind": "429", "retry_after_s": 1, "probability": 0.01},
    {"kind": "503", "probability": 0.01},
    {"kind": "500", "probability": 0.01},
    {"kind": "refuse", "probability": 0.008},
    {"kind": "garbage", "probability": 0.004},
    {"kind": "delay", "ms": 200.0, "probability": 0.004},
    {"kind": "hang", "probability": 0.002},
    {"kind": "hang", "after_chunks": 2, "probability": 0.002},
)
SHORT_PATIENCE = {"gateway.timeouts.first_byte_s": 1.0, "gateway.timeouts.idle_s": 1.0}  # a hang is noticed in time
OTHERS, OTHERS_REQUESTS, MOST_REQUESTS = 8, 12, 600
_stages = count()


class Stage:
    """One scenario's gateway, its workers and its client."""

    def __init__(self, fleet: MockFleet, gateway: Gateway, *, faulty: bool) -> None:
        self.fleet = fleet
        self.gateway = gateway
        self.faulty = faulty
        self.client = Client(gateway.url)
        self._prompts = np.random.default_rng([SEED, next(_stages)])  # new ones: workers keep what they computed

    @property
    def calm(self) -> bool:
        return not self.faulty

    def prompt(self, tokens: int = 320) -> list[int]:
        """Token ids that nobody has seen."""
        return self._prompts.integers(1000, 190_000, size=tokens).tolist()

    def receipt(self, seen: Seen) -> Receipt:
        return next(receipt for receipt in receipts(self.gateway) if receipt.request_id == seen.request_id)

    async def until(self, condition: Callable[[], object]) -> None:
        await until(condition, within_s=PATIENCE_S)

    async def until_held(self, prompt: list[int], worker: str | None) -> None:
        """Until the gateway has heard that this worker holds all full blocks of the prompt."""
        async with aiohttp.ClientSession() as session, asyncio.timeout(PATIENCE_S):
            while True:
                async with session.post(f"{self.gateway.admin_url}/admin/match", json={"prompt": prompt}) as response:
                    candidates = (await response.json())["candidates"]
                held = {each["worker"]: each["tiers"].get("gpu", 0) for each in candidates}
                if held.get(worker or "", 0) >= len(prompt) // 16 * 16 - 16:
                    return
                await asyncio.sleep(0.02)

    def routable(self) -> list[str]:
        return [worker.name for worker in self.gateway.status().workers if worker.routable]

    def load(self, worker: str) -> int:
        known = next(each for each in self.gateway.status().workers if each.name == worker)
        return known.targets[0].active_requests + known.targets[0].foreign_requests

    async def fault(self, worker: str, **fault: Any) -> None:
        """On top of what is on already. A fault with a count is for requests of clients and not spent on our own."""
        await _call("POST", f"{self.fleet.worker(worker).url}/mock/faults", {"path": COMPLETIONS, **fault})

    async def heal(self, worker: str) -> None:
        """No fault any more but those of a faulty stage."""
        await spoil(self.fleet.worker(worker), FAULTS if self.faulty else ())

    async def others(self) -> None:
        """Clients that have nothing to do with the scenario."""

        async def be_client(number: int) -> None:
            history = self.prompt(160)
            for turn in range(OTHERS_REQUESTS):
                history = [*history, *self.prompt(32)]
                leaves = 0.01 if turn % 7 == 3 else None
                await self.client.complete(
                    history, session=f"other-{number}", stream=bool(turn % 2), leave_after_s=leaves
                )

        await asyncio.gather(*(be_client(number) for number in range(OTHERS)))

    async def until_struck(self) -> None:
        """More requests until a fault has struck at least once."""
        while not any(attempt.fault for receipt in receipts(self.gateway) for attempt in receipt.attempts):
            assert len(self.client.seen) < MOST_REQUESTS, "no fault ever struck"
            await self.client.complete(self.prompt(64))


@asynccontextmanager
async def stage_of(
    fleet: MockFleet, settings: Mapping[str, object], *, workers: int, faulty: bool, entry: Mapping[str, object]
) -> AsyncIterator[Stage]:
    """The first `workers` of the fleet, whole and empty-handed, behind a gateway that sees them all as routable.

    `settings` are dotted configuration keys; `entry` has more members for every `[[workers]]` table.
    """
    chosen = fleet.workers[:workers]
    for worker in chosen:
        await spoil(worker, ())
    flags: dict[str, object] = {
        "workers": [{"name": worker.name, "url": worker.url, "adapter": "mock", **entry} for worker in chosen],
        "gateway.port": 0,
        "gateway.admin_port": 0,
        "health.interval_s": 0.1,
        **(SHORT_PATIENCE if faulty else {}),
        **settings,
    }
    async with Gateway(load_config(Path("/dev/null"), {}, flags), seed=SEED, key_seed=b"test") as gateway:
        stage = Stage(fleet, gateway, faulty=faulty)
        await stage.until(lambda: len(stage.routable()) == workers)
        if faulty:
            for worker in chosen:
                await spoil(worker, FAULTS)
        try:
            yield stage
        finally:
            for worker in chosen:
                await spoil(fleet.worker(worker.name), ())


async def spoil(worker: RunningWorker, faults: tuple[dict[str, Any], ...]) -> None:
    """These faults and no others."""
    url = f"{worker.url}/mock/faults"
    await _call("DELETE", url)
    for fault in faults:
        await _call("POST", url, fault)


async def _call(method: str, url: str, body: object = None) -> None:
    async with aiohttp.ClientSession() as session, session.request(method, url, json=body) as response:
        assert response.status == 200, await response.text()
