"""A gateway whose worker's events pass through the event proxy, with an agent beside the worker or without one."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

import msgspec

from kvrelay.core.model.census import Census
from kvrelay.core.model.units import IndexState
from kvrelay.core.routing.status import MatchAnswer, TargetStatus
from kvrelay.edge.agent.host import AgentHost
from kvrelay.edge.chaos.events import EventProxy
from kvrelay.edge.gateway.gateway import Gateway
from kvrelay.edge.system.config import WorkerConfig, load_config

SIZE = 16
PROMPT_TOKENS = 200
BLOCKS = PROMPT_TOKENS // SIZE


def prompt(n: int) -> list[int]:
    return list(range(1000 * n, 1000 * n + PROMPT_TOKENS))


async def complete(url: str, *numbers: int) -> None:
    """Each prompt alone: as many event batches as prompts, at least."""
    for n in numbers:
        await asyncio.to_thread(_complete, url, n)


def _complete(url: str, n: int) -> None:
    body = json.dumps({"model": "mock-model", "prompt": prompt(n), "max_tokens": 1}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        assert response.status == 200


class Watched:
    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    def target(self, worker: str = "a") -> TargetStatus:
        return next(w for w in self.gateway.status().workers if w.name == worker).targets[0]

    def census(self) -> Census:
        return self.gateway.router._keeper.residency.census(0)

    def reports(self) -> dict[str, float]:
        return {kind: count for (kind,), count in self.gateway.metrics.reports.values.items()}

    async def matched(self, n: int, worker: str = "a") -> int:
        """Tokens of prompt `n` that the gateway believes to be there."""
        return await self.matched_of({"model": "mock-model", "prompt": prompt(n)}, worker)

    async def matched_of(self, body: dict[str, Any], worker: str = "a") -> int:
        answer = await asyncio.to_thread(self._match, json.dumps(body).encode())
        return next(c for c in answer.candidates if c.worker == worker).matched_tokens

    def _match(self, body: bytes) -> MatchAnswer:
        with urllib.request.urlopen(f"{self.gateway.admin_url}/admin/match", body, timeout=30) as response:
            return msgspec.json.decode(response.read(), type=MatchAnswer)

    async def until(self, condition: Callable[[], object], *, within_s: float = 30.0) -> None:
        deadline = time.monotonic() + within_s
        while not (self.gateway.status().workers and condition()):
            assert time.monotonic() < deadline, (self.gateway.status(), self.reports())
            await asyncio.sleep(0.01)

    async def until_live(self) -> None:
        await self.until(lambda: self.target().index_state is IndexState.LIVE)


@asynccontextmanager
async def watching(*workers: WorkerConfig, **env: str) -> AsyncIterator[Watched]:
    settings = {"GATEWAY__PORT": "0", "GATEWAY__ADMIN_PORT": "0", "HEALTH__INTERVAL_S": "0.2", **env}
    config = load_config(env={f"KVRELAY_{name}": value for name, value in settings.items()})
    async with Gateway(config.model_copy(update={"workers": workers}), key_seed=b"test") as gateway:
        yield Watched(gateway)


class Publishing(Protocol):
    """A worker that publishes events: a mock's process or a real engine's."""

    @property
    def url(self) -> str: ...

    @property
    def events(self) -> str | None: ...

    @property
    def replay(self) -> str | None: ...


async def fresh_truth(worker: Publishing) -> Census:
    """What a gateway that starts now, with nothing between it and the worker, replays."""
    async with watching(WorkerConfig(url=worker.url, name="a")) as fresh:
        await fresh.until_live()
        return fresh.census()


@asynccontextmanager
async def behind_proxy(
    worker: Publishing, *, replay: bool = True, agent: AgentHost | None = None
) -> AsyncIterator[tuple[Watched, EventProxy]]:
    """The gateway hears the worker through the proxy only; the agent, if there is one, hears it directly."""
    assert worker.events is not None
    with EventProxy(worker.events, replay=worker.replay if replay else None) as proxy:
        assert await asyncio.to_thread(proxy.wait_until_connected, 10)
        config = WorkerConfig(
            url=worker.url,
            name="a",
            events=proxy.events,
            replay=proxy.replay or "none",
            agent=agent.endpoint if agent is not None else "",
        )
        async with watching(config) as watch:
            asks = int(agent is None) + 1 if replay else 0  # who joins asks, and who has just connected
            await watch.until(lambda: [done.action for done in proxy.actions].count("replay") == asks)
            yield watch, proxy
