"""One arm: a fresh fleet and a fresh gateway, a primer, the replay, the end of all of it, and what was recorded.

Nothing survives from one arm to the next: new processes are new incarnations, on new ports, with empty caches and an
empty index. The primer is the same for every arm; it teaches the router each worker's pace and is in no figure.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from kvrelay.core.receipts.receipt import Receipt
from kvrelay.core.traces.plan import Plan
from kvrelay.core.traces.synth import PromptSynth
from kvrelay.edge.worker.launch import MockFleet, RunningWorker
from kvrelay.lab.arms.gateway_process import GatewayProcess
from kvrelay.lab.arms.leftovers import leftovers
from kvrelay.lab.arms.manifest import ArmFacts, ProcessFacts
from kvrelay.lab.arms.results import ArmData
from kvrelay.lab.arms.settings import RunSettings
from kvrelay.lab.replay.client import CompletionClient, completion_body
from kvrelay.lab.replay.replay import Arm, replay
from kvrelay.lab.replay.sample import Sample

PRIMER_SESSION = "primer"


class PrimerError(Exception):
    """A primer request failed: the arm would be measured on a fleet that does not work."""


class ArmOutcome(Struct, frozen=True, eq=False):
    data: ArmData
    facts: ArmFacts


async def run_arm(
    arm: Arm, plan: Plan, settings: RunSettings, *, folder: Path, on_sample: Callable[[Sample], None]
) -> ArmOutcome:
    """Raises when the arm could not be run; requests that failed are samples, not exceptions."""
    folder.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240
    started_s, samples = time.monotonic(), []

    def keep(sample: Sample) -> None:
        samples.append(sample)
        on_sample(sample)

    async with MockFleet(settings.fleet.specs(), ready_timeout_s=settings.ready_timeout_s) as fleet:
        config = _write_config(folder, arm, fleet.workers, settings)
        log, ready_timeout_s = folder / "gateway.log", settings.ready_timeout_s
        async with GatewayProcess(config, log=log, ready_timeout_s=ready_timeout_s) as gateway:
            index_blocks = await gateway.wait_for_workers([worker.name for worker in fleet.workers])
            processes = _processes(fleet.workers, gateway)
            async with CompletionClient(gateway.ready.url, timeout_s=settings.request_timeout_s) as client:
                await _prime(client, arm, settings)
                await replay(plan, client, arm=arm, model=settings.fleet.model, on_sample=keep)
    left = await leftovers(
        [process.pid for process in processes], [url for process in processes for url in process.urls]
    )
    receipts = read_receipts(folder / "receipts.jsonl")
    workers = tuple(worker.name for worker in fleet.workers)
    facts = ArmFacts(
        arm=arm.name,
        policy=arm.policy,
        repeat=arm.repeat,
        processes=processes,
        index_blocks_at_start=index_blocks,
        wall_s=round(time.monotonic() - started_s, 3),
        receipts=len(receipts),
        samples=len(samples),
        leftovers=tuple(left),
    )
    return ArmOutcome(ArmData(arm, workers, tuple(samples), {r.request_id: r for r in receipts}), facts)


def read_receipts(path: Path) -> list[Receipt]:
    decoder = msgspec.json.Decoder(Receipt)
    return [decoder.decode(line) for line in path.read_bytes().splitlines()]


def is_primer(receipt: Receipt) -> bool:
    return (receipt.session_id or "").startswith(PRIMER_SESSION)


def _write_config(folder: Path, arm: Arm, workers: Sequence[RunningWorker], settings: RunSettings) -> Path:
    """The arms' configurations differ in the policy, and in ports and paths; nothing else."""
    setup = settings.setup_of(arm.policy)
    lines = [
        "[gateway]",
        "port = 0",
        "admin_port = 0",
        f"policy = {json.dumps(setup.policy)}",
        f"scorer = {json.dumps(setup.scorer)}",
        "[gateway.drain]",
        "grace_s = 3.0",
        "[receipts]",
        f"path = {json.dumps(str((folder / 'receipts.jsonl').resolve()))}",
    ]
    if setup.weights is not None:
        lines.append("[policy.cache_load]")
        lines += [f"{name} = {value}" for name, value in msgspec.to_builtins(setup.weights).items()]
    for worker in workers:
        lines += ["[[workers]]", f"name = {json.dumps(worker.name)}", f"url = {json.dumps(worker.url)}"]
        lines += ['adapter = "mock"', f"events = {json.dumps(worker.events)}", f"replay = {json.dumps(worker.replay)}"]
    path = folder / "gateway.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def _processes(workers: Sequence[RunningWorker], gateway: GatewayProcess) -> tuple[ProcessFacts, ...]:
    ready = gateway.ready
    facts = [ProcessFacts("gateway", ready.pid, (ready.url, ready.admin_url))]
    for worker in workers:
        urls = tuple(url for url in (worker.url, worker.events, worker.replay) if url is not None)
        facts.append(ProcessFacts(worker.name, worker.pid, urls, worker.incarnation))
    return tuple(facts)


async def _prime(client: CompletionClient, arm: Arm, settings: RunSettings) -> None:
    """Rounds of one prompt per worker: the policies that look at load spread them, the others rotate."""
    synth = PromptSynth(settings.seed, settings.fleet.block_size_tokens, {})
    for round_number in range(settings.primer_prompts_per_worker):
        names = [f"{PRIMER_SESSION}-{round_number}-{number}" for number in range(settings.fleet.workers)]
        outcomes = await asyncio.gather(
            *(
                client.complete(
                    completion_body(settings.fleet.model, synth.unrelated(name, settings.primer_tokens), 2),
                    request_id=f"{arm.name}:{name}",
                    session_id=name,
                )
                for name in names
            )
        )
        for outcome in outcomes:
            if outcome.failure is not None:
                raise PrimerError(f"a primer request of arm {arm.name} failed: {outcome.failure}")
