"""A preset in blocks through the gateway: caches emptied, kept, or lost with their workers between the blocks.

One policy at a time, on mock workers of its own. Blocks are not arms: they differ in what the caches hold and in
nothing else, so a block is compared with the other blocks of its policy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from kvrelay.core.stats.distribution import Distribution, distribution
from kvrelay.core.traces.plan import Plan
from kvrelay.core.traces.presets import Phase, Preparation
from kvrelay.edge.worker.launch import MockFleet
from kvrelay.lab.arms.arm import reset_caches, write_config
from kvrelay.lab.arms.arm_store import forget, mock_fleet
from kvrelay.lab.arms.contender import Contender
from kvrelay.lab.arms.fleets import ArmWorker, of_mock
from kvrelay.lab.arms.gateway_process import GatewayProcess, GatewayStartError
from kvrelay.lab.arms.settings import RunSettings
from kvrelay.lab.replay.client import CompletionClient
from kvrelay.lab.replay.phases import replay_in_phases
from kvrelay.lab.replay.replay import Arm
from kvrelay.lab.replay.sample import Sample

POLL_S = 0.05


class Block(Struct, frozen=True):
    """What came out of one block. Tokens are of requests whose engine reported both."""

    name: str
    before: Preparation
    requests: int
    failures: int
    answers_without_content: int
    prompt_tokens: int
    cached_tokens: int | None  # null when some request reported none
    ttft_ms: Distribution  # from when a request was due

    @property
    def hit_share(self) -> float | None:
        if self.cached_tokens is None or not self.prompt_tokens:
            return None
        return round(self.cached_tokens / self.prompt_tokens, 6)


async def run_blocks(
    plan: Plan,
    phases: tuple[Phase, ...],
    contender: Contender,
    settings: RunSettings,
    *,
    folder: Path,
    on_sample: Callable[[Sample], None],
) -> tuple[Block, ...]:
    """Raises when workers or the gateway do not start or a cache is not emptied; failed requests are counted."""
    folder.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240
    samples: list[Sample] = []

    def keep(sample: Sample) -> None:
        samples.append(sample)
        on_sample(sample)

    async with mock_fleet(settings.fleet.specs(), contender, ready_timeout_s=settings.ready_timeout_s) as fleet:
        workers = tuple(of_mock(worker) for worker in fleet.workers)
        config = write_config(folder, contender, workers)
        log, timeout_s = folder / "gateway.log", settings.ready_timeout_s
        async with GatewayProcess(config, log=log, ready_timeout_s=timeout_s) as gateway:
            await gateway.wait_for_workers([worker.name for worker in workers])
            async with CompletionClient(gateway.ready.url, timeout_s=settings.request_timeout_s) as client:
                preparing = _Preparing(fleet, gateway, workers, client, timeout_s)
                await replay_in_phases(
                    plan,
                    phases,
                    prepare=preparing.prepare,
                    arm=Arm(contender.name, 0),
                    model=settings.fleet.model,
                    on_sample=keep,
                    max_in_flight=settings.max_in_flight,
                )
    return tuple(block_of(phase, [sample for sample in samples if sample.phase == phase.name]) for phase in phases)


def block_of(phase: Phase, samples: list[Sample]) -> Block:
    answered = [sample for sample in samples if sample.ok]
    cached = [sample.cached_tokens for sample in answered]
    known = [tokens for tokens in cached if tokens is not None]
    return Block(
        name=phase.name,
        before=phase.before,
        requests=len(samples),
        failures=len(samples) - len(answered),
        answers_without_content=sum(sample.without_content for sample in samples),
        prompt_tokens=sum(sample.prompt_tokens or 0 for sample in answered),
        cached_tokens=sum(known) if answered and len(known) == len(cached) else None,
        ttft_ms=distribution([sample.ttft_ms for sample in answered if sample.ttft_ms is not None]),
    )


class _Preparing:
    """Does to the caches what a block asks for, and waits until the gateway knows it."""

    def __init__(
        self,
        fleet: MockFleet,
        gateway: GatewayProcess,
        workers: tuple[ArmWorker, ...],
        client: CompletionClient,
        timeout_s: float,
    ) -> None:
        self._fleet = fleet
        self._gateway = gateway
        self._workers = workers
        self._client = client
        self._timeout_s = timeout_s

    async def prepare(self, phase: Phase) -> CompletionClient:
        match phase.before:
            case "reset":
                await reset_caches(self._gateway, self._workers)
                await asyncio.to_thread(forget, [worker.spec for worker in self._fleet.workers])
            case "restart":
                await self._restart()
            case "nothing":
                pass
        return self._client

    async def _restart(self) -> None:
        """All at once, on the same addresses; the gateway has to notice by itself that these are new lives."""
        names = [worker.name for worker in self._workers]
        started = await asyncio.gather(*(asyncio.to_thread(self._fleet.restart, name) for name in names))
        lives = {worker.name: worker.incarnation for worker in started}
        try:
            async with asyncio.timeout(self._timeout_s):
                while await self._known_lives() != lives:  # noqa: ASYNC110 - another process, it has no event for us
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise GatewayStartError(f"the gateway did not notice that {', '.join(names)} were started again") from None
        await self._gateway.wait_for_workers(names)

    async def _known_lives(self) -> dict[str, str | None]:
        return {worker["name"]: worker["incarnation"] for worker in (await self._gateway.status())["workers"]}
