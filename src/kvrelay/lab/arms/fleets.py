"""The workers of an arm: mock processes that are new every time, or a fleet that all arms share.

Both say the same of each worker, and everything they say was asked of the worker or read from this machine; what could
not be found out is None.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

import aiohttp
from msgspec import Struct

from kvrelay.core.gates.evidence import Hardware, Layer, hardware_of, layer_of
from kvrelay.edge.connectors import ask
from kvrelay.edge.connectors.base import WorkerAnswerUnusable, WorkerUnreachable
from kvrelay.edge.connectors.registry import CONNECTORS, detect
from kvrelay.edge.connectors.tiering import OURS, implementations
from kvrelay.edge.system.sections import WorkerConfig
from kvrelay.edge.system.urls import join_url
from kvrelay.edge.worker.launch import RunningWorker
from kvrelay.lab.arms import local_process
from kvrelay.lab.arms.arm_store import mock_fleet
from kvrelay.lab.arms.contender import Contender
from kvrelay.lab.arms.fleet_file import FleetFile
from kvrelay.lab.arms.model_facts import ModelFacts, local_model, mock_model
from kvrelay.lab.arms.settings import MockFleetSettings, Reset

ASK_TIMEOUT_S = 10.0
NO_TIERS = "none"


class FleetUnusable(Exception):
    """A worker of the fleet does not answer, or not as its kind of engine does."""


class ArmWorker(Struct, frozen=True, kw_only=True):
    """One worker as an arm finds it. `toml` are the lines of its `[[workers]]` table."""

    name: str
    url: str
    toml: tuple[str, ...]
    engine: str
    hardware: Hardware
    version: str | None = None
    incarnation: str | None = None
    block_size_tokens: int | None = None
    models: tuple[str, ...] = ()
    max_model_len: int | None = None  # longest prompt and answer together
    pid: int | None = None
    log: str | None = None
    gpu_uuids: tuple[str, ...] | None = None
    hash_seed: str | None = None
    endpoints: tuple[str, ...] = ()  # other addresses that it listens on
    headers: Mapping[str, str] = {}
    tiering: str | None = None  # which implementation of KV tiers it runs with, `none` if with none; None: not known


class Described(Struct, frozen=True):
    """A fleet before its first arm."""

    workers: tuple[ArmWorker, ...]
    model: ModelFacts


class ArmFleet(Protocol):
    """Where arms run. `resets`: what can empty the caches between two arms, the default first."""

    @property
    def resets(self) -> tuple[Reset, ...]: ...

    async def describe(self) -> Described:
        """Raises FleetUnusable."""
        ...

    def arm(self, contender: Contender) -> AbstractAsyncContextManager[tuple[ArmWorker, ...]]:
        """The workers of one arm. Leaving it ends what it started, and nothing else. Raises FleetUnusable."""
        ...


class FreshMocks:
    """New mock processes for every arm; leaving an arm ends them."""

    resets = (Reset.FRESH_PROCESSES,)

    def __init__(self, settings: MockFleetSettings, *, ready_timeout_s: float) -> None:
        self._settings = settings
        self._ready_timeout_s = ready_timeout_s

    @asynccontextmanager
    async def arm(self, contender: Contender) -> AsyncIterator[tuple[ArmWorker, ...]]:
        async with mock_fleet(self._settings.specs(), contender, ready_timeout_s=self._ready_timeout_s) as fleet:
            yield tuple(of_mock(worker) for worker in fleet.workers)

    async def describe(self) -> Described:
        return self.as_specified()

    def as_specified(self) -> Described:
        """From the specs: the processes of an arm are started with it."""
        workers = tuple(
            ArmWorker(
                name=spec.name,
                url=f"http://{spec.host}",
                toml=(),
                engine="mock",
                hardware=Hardware.MOCK,
                version="mock",
                block_size_tokens=spec.block_size_tokens,
                models=(spec.model,),
            )
            for spec in self._settings.specs()
        )
        return Described(workers, mock_model(self._settings.model))


class StandingFleet:
    """Workers that run already and go on running; only their caches are emptied between arms."""

    resets = (Reset.PREFIX_CACHE, Reset.CACHE_SALT, Reset.NONE)

    def __init__(self, file: FleetFile) -> None:
        self._file = file

    @asynccontextmanager
    async def arm(self, contender: Contender) -> AsyncIterator[tuple[ArmWorker, ...]]:
        """Asked anew for every arm: a worker that was started again has another incarnation."""
        if contender.store is not None or contender.engine_args:
            raise FleetUnusable(
                f"`{contender.name}` has tiers of its own, and workers that run already keep those that they have; "
                "start the fleet with them and replay it into a folder of its own"
            )
        yield await self._ask_all()

    async def describe(self) -> Described:
        workers = await self._ask_all()
        return Described(workers, self._model(workers))

    async def _ask_all(self) -> tuple[ArmWorker, ...]:
        timeout = aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            return tuple(await asyncio.gather(*(self._ask(session, worker) for worker in self._file.workers)))

    def _model(self, workers: Sequence[ArmWorker]) -> ModelFacts:
        if layer_of_fleet(workers) is Layer.MOCK:
            return mock_model(self._served_model(workers))
        return local_model(self._served_model(workers), self._file.model)

    def _served_model(self, workers: Sequence[ArmWorker]) -> str:
        shared = [name for name in workers[0].models if all(name in worker.models for worker in workers)]
        if not shared:
            served = "; ".join(f"{worker.name}: {', '.join(worker.models) or 'none'}" for worker in workers)
            raise FleetUnusable(f"the workers serve no common model ({served})")
        return shared[0]

    async def _ask(self, session: aiohttp.ClientSession, config: WorkerConfig) -> ArmWorker:
        headers = self._file.headers(config)
        try:
            connector = (
                await detect(session, config.url, headers) if config.adapter == "auto" else CONNECTORS[config.adapter]
            )
            said = await connector.describe(session, config.url, headers)
        except (WorkerUnreachable, WorkerAnswerUnusable) as problem:
            raise FleetUnusable(f"worker `{config.name}` at {config.url}: {problem}") from problem
        noted = self._file.notes.get(config.name)
        pid = local_process.listener_pid(config.url)
        return ArmWorker(
            name=config.name,
            url=config.url,
            toml=self._file.lines(config),
            engine=connector.name,
            hardware=_hardware(connector.name, pid),
            version=said.version,
            incarnation=said.incarnation,
            block_size_tokens=said.spec.block_size_tokens or config.block_size,
            models=said.spec.models,
            max_model_len=await _max_model_len(session, config.url, headers),
            pid=pid,
            log=noted.log if noted and noted.log else (None if pid is None else local_process.log_path(pid)),
            gpu_uuids=noted.gpu_uuids if noted and noted.gpu_uuids else _gpu_uuids(pid),
            hash_seed=None if pid is None else local_process.environment_of(pid, "PYTHONHASHSEED"),
            endpoints=tuple(source.endpoint for source in said.sources),
            headers=headers,
            tiering=None if pid is None else _tiering(pid),
        )


def layer_of_fleet(workers: Sequence[ArmWorker]) -> Layer:
    return layer_of(mock=any(worker.engine == "mock" for worker in workers), workers=len(workers))


def hardware_of_fleet(workers: Sequence[ArmWorker]) -> Hardware:
    return hardware_of([worker.hardware for worker in workers])


def of_mock(worker: RunningWorker) -> ArmWorker:
    lines = [f"name = {json.dumps(worker.name)}", f"url = {json.dumps(worker.url)}", 'adapter = "mock"']
    lines += [f"events = {json.dumps(worker.events)}", f"replay = {json.dumps(worker.replay)}"]
    return ArmWorker(
        name=worker.name,
        url=worker.url,
        toml=tuple(lines),
        engine="mock",
        hardware=Hardware.MOCK,
        version="mock",
        incarnation=worker.incarnation,
        block_size_tokens=worker.spec.block_size_tokens,
        models=(worker.spec.model,),
        pid=worker.pid,
        log=local_process.log_path(worker.pid) or "the run's own standard error",
        gpu_uuids=(),
        hash_seed=worker.spec.hash_seed,
        endpoints=tuple(url for url in (worker.events, worker.replay) if url is not None),
        tiering=OURS if worker.spec.store is not None else NO_TIERS,
    )


def _tiering(pid: int) -> str | None:
    words = local_process.command_line(pid)
    return None if words is None else " and ".join(implementations(words)) or NO_TIERS


class _Model(Struct):
    max_model_len: int | None = None


class _Models(Struct):
    data: list[_Model] = []


async def _max_model_len(session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> int | None:
    """vLLM and SGLang say it in their list of models; None where nobody says it."""
    try:
        models = await ask.get_json(session, join_url(url, "/v1/models"), headers, _Models)
    except WorkerAnswerUnusable:
        return None
    return min((model.max_model_len for model in models.data if model.max_model_len is not None), default=None)


def _hardware(engine: str, pid: int | None) -> Hardware:
    if engine == "mock":
        return Hardware.MOCK
    return Hardware.UNKNOWN if pid is None else local_process.hardware_of_process(pid)


def _gpu_uuids(pid: int | None) -> tuple[str, ...] | None:
    if pid is None:
        return None
    if local_process.hardware_of_process(pid) is Hardware.CPU:
        return ()
    return local_process.gpu_uuids(pid)
