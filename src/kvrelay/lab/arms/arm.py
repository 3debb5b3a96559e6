"""One arm: its workers, a gateway of its own, a primer, the replay, the end of all that was started, what was recorded.

Mock workers are new for every arm. Workers that all arms share are emptied by their own order or kept apart by a salt;
the gateway and its index are new in any case. The primer is the same for every arm; it teaches the router each worker's
pace and is in no figure.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp
import msgspec
from msgspec import Struct

from kvrelay import __version__
from kvrelay.core.receipts.receipt import Receipt
from kvrelay.core.stats.seen_before import SeenBefore
from kvrelay.core.traces.plan import Plan
from kvrelay.core.traces.synth import PromptSynth
from kvrelay.lab.arms.contender import Contender
from kvrelay.lab.arms.counters import Counted, UsageWatch, added, read_all, save_pages
from kvrelay.lab.arms.fleets import ArmFleet, ArmWorker
from kvrelay.lab.arms.gateway_process import GatewayProcess
from kvrelay.lab.arms.isolation import Start, isolation_of
from kvrelay.lab.arms.leftovers import leftovers
from kvrelay.lab.arms.manifest import ArmFacts, ProcessFacts
from kvrelay.lab.arms.results import ArmData
from kvrelay.lab.arms.settings import Reset, RunSettings
from kvrelay.lab.replay.client import CompletionClient, completion_body
from kvrelay.lab.replay.replay import Arm, replay
from kvrelay.lab.replay.sample import Sample

PRIMER_SESSION = "primer"
RESET_TRIES = 5
SETTLE_S = 0.2  # the last receipts are on their way to the file, the last counters to the page


class PrimerError(Exception):
    """A primer request failed: the arm would be measured on a fleet that does not work."""


class ResetRefused(Exception):
    """A worker kept its cache although it was told to drop it."""


class ArmOutcome(Struct, frozen=True, eq=False):
    data: ArmData
    facts: ArmFacts


class ArmTask(Struct, frozen=True, eq=False):
    """What is the same for all arms of a run."""

    plan: Plan
    settings: RunSettings
    fleet: ArmFleet
    model: str
    block_size_tokens: int


class _Recorded(Struct, frozen=True, eq=False):
    """What was there while the arm ran."""

    workers: tuple[ArmWorker, ...]
    processes: tuple[ProcessFacts, ...]
    start: Start
    started_s: float
    replay_s: float
    counters: dict[str, Counted]


async def run_arm(arm: Arm, task: ArmTask, *, folder: Path, on_sample: Callable[[Sample], None]) -> ArmOutcome:
    """Raises when the arm could not be run; requests that failed are samples, not exceptions."""
    folder.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240
    started_s, samples = time.monotonic(), []

    def keep(sample: Sample) -> None:
        samples.append(sample)
        on_sample(sample)

    recorded = await _run(arm, task, folder, keep)
    ours = [process for process in recorded.processes if process.role == "router" or _is_ours(task)]
    left = await leftovers(
        [process.pid for process in ours if process.pid is not None], [url for process in ours for url in process.urls]
    )
    receipts = {receipt.request_id: receipt for receipt in read_receipts(folder / "receipts.jsonl")}
    seen_tokens = _seen_before(samples, task.plan, task.block_size_tokens)
    (folder / "seen.json").write_bytes(msgspec.json.encode(seen_tokens))
    claims = {name: receipt.matched_tokens_at_route for name, receipt in receipts.items()}
    facts = ArmFacts(
        arm=arm.name,
        policy=arm.policy,
        repeat=arm.repeat,
        started_s=recorded.started_s,
        processes=recorded.processes,
        config_sha256=hashlib.sha256((folder / "gateway.toml").read_bytes()).hexdigest(),
        index_blocks_at_start=recorded.start.index_blocks,
        isolation=isolation_of(recorded.start, samples, claims, seen_tokens, recorded.counters),
        counters=recorded.counters,
        schedule_sha256=_schedule_digest(task.plan, samples),
        primer_sha256=primer_digest(task.settings, task.model, len(recorded.workers), task.block_size_tokens),
        wall_s=round(time.monotonic() - started_s, 3),
        replay_s=round(recorded.replay_s, 3),
        receipts=len(receipts),
        samples=len(samples),
        leftovers=tuple(left),
    )
    names = tuple(worker.name for worker in recorded.workers)
    return ArmOutcome(ArmData(arm, names, tuple(samples), receipts, seen_tokens, facts.replay_s), facts)


async def _run(arm: Arm, task: ArmTask, folder: Path, keep: Callable[[Sample], None]) -> _Recorded:
    settings = task.settings
    salt = f"{arm.name}:{time.time_ns()}" if settings.reset is Reset.CACHE_SALT else None
    contender = settings.contender(arm.policy)
    async with task.fleet.arm(contender) as workers:
        config = write_config(folder, contender, workers)
        log, ready_timeout_s = folder / "gateway.log", settings.ready_timeout_s
        async with GatewayProcess(config, log=log, ready_timeout_s=ready_timeout_s) as gateway:
            blocks = await gateway.wait_for_workers(
                [worker.name for worker in workers], without_events=[w.name for w in workers if not w.endpoints]
            )
            if settings.reset is Reset.PREFIX_CACHE:
                blocks = await reset_caches(gateway, workers)
            start = Start(settings.reset, blocks)
            processes = await _processes(workers, gateway, log)
            async with CompletionClient(gateway.ready.url, timeout_s=settings.request_timeout_s) as client:
                await _prime(client, arm, task, len(workers), salt)
                before = await read_all(workers)
                save_pages(folder / "metrics_before", before)
                started_s, began_s = time.time(), time.monotonic()
                async with UsageWatch(workers) as usage:
                    await replay(
                        task.plan,
                        client,
                        arm=arm,
                        model=task.model,
                        on_sample=keep,
                        cache_salt=salt,
                        max_in_flight=settings.max_in_flight,
                    )
                replay_s = time.monotonic() - began_s
                await asyncio.sleep(SETTLE_S)
                after = await read_all(workers)
                save_pages(folder / "metrics_after", after)
    counters = {name: added(before[name], after[name], usage.peaks.get(name)) for name in before}
    return _Recorded(workers, processes, start, started_s, replay_s, counters)


def read_receipts(path: Path) -> list[Receipt]:
    decoder = msgspec.json.Decoder(Receipt)
    return [decoder.decode(line) for line in path.read_bytes().splitlines()]


def is_primer(receipt: Receipt) -> bool:
    return (receipt.session_id or "").startswith(PRIMER_SESSION)


def primer_digest(settings: RunSettings, model: str, workers: int, block_size_tokens: int) -> str:
    """Over every body of the primer: the same for all arms, because nothing of it depends on the arm."""
    summed = hashlib.sha256()
    for _, body in _primer(settings, model, workers, block_size_tokens, None):
        summed.update(body)
    return summed.hexdigest()


def write_config(folder: Path, contender: Contender, workers: Sequence[ArmWorker]) -> Path:
    """The arms' configurations differ in what their contenders set, and in ports and paths; nothing else."""
    values: dict[str, object] = {
        "gateway.port": 0,
        "gateway.admin_port": 0,
        "gateway.drain.grace_s": 3.0,
        "receipts.path": str((folder / "receipts.jsonl").resolve()),
        **contender.sets,
    }
    tables: dict[str, list[str]] = {}
    for key, value in values.items():
        table, _, name = key.rpartition(".")
        tables.setdefault(table, []).append(f"{name} = {json.dumps(value)}")
    store = dict(contender.store or {})
    tiers = store.pop("tiers", ())
    tables |= {"store": [f"{name} = {json.dumps(value)}" for name, value in store.items()]} if store else {}
    lines = [line for table in sorted(tables) for line in (f"[{table}]", *tables[table])]
    for tier in tiers:
        lines += ["[[store.tiers]]", *(f"{name} = {json.dumps(value)}" for name, value in tier.items())]
    for worker in workers:
        lines += ["[[workers]]", *worker.toml]
    path = folder / "gateway.toml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _is_ours(task: ArmTask) -> bool:
    """Whether the arm started its workers, and therefore has to end them."""
    return Reset.FRESH_PROCESSES in task.fleet.resets


async def reset_caches(gateway: GatewayProcess, workers: Sequence[ArmWorker]) -> int:
    """Through the gateway, which forgets what it knew at the same moment. Blocks in the index afterwards.

    Events of earlier arms may still be on their way to the new gateway and would be believed after the reset: it is
    repeated until the index stays empty, or not any more.
    """
    async with aiohttp.ClientSession() as session:
        for _ in range(RESET_TRIES):
            for worker in workers:
                url = f"{gateway.ready.admin_url}/admin/workers/{worker.name}/reset"
                async with session.post(url) as answer:
                    if answer.status != 200:
                        raise ResetRefused(f"`{worker.name}`: {(await answer.text())[:300]}")
            await asyncio.sleep(SETTLE_S)
            blocks = int((await gateway.status())["index_blocks"])
            if not blocks:
                break
    return blocks


async def _processes(workers: Sequence[ArmWorker], gateway: GatewayProcess, log: Path) -> tuple[ProcessFacts, ...]:
    known = {worker["name"]: worker for worker in (await gateway.status())["workers"]}
    ready = gateway.ready
    router = ProcessFacts(
        name="gateway",
        role="router",
        pid=ready.pid,
        urls=(ready.url, ready.admin_url),
        log=str(log.resolve()),  # noqa: ASYNC240
        version=__version__,
    )
    return (
        router,
        *(
            ProcessFacts(
                name=worker.name,
                role="worker",
                pid=worker.pid,
                urls=(worker.url, *(url for url in worker.endpoints if url.startswith("tcp://"))),
                log=worker.log,
                version=worker.version,
                incarnation=worker.incarnation or known[worker.name]["incarnation"],
                hardware=worker.hardware.value,
                gpu_uuids=worker.gpu_uuids,
                block_size_tokens=worker.block_size_tokens,
                router_block_size_tokens=known[worker.name]["targets"][0]["block_size"],
                hash_seed=worker.hash_seed,
                tiering=worker.tiering,
            )
            for worker in workers
        ),
    )


async def _prime(client: CompletionClient, arm: Arm, task: ArmTask, workers: int, salt: str | None) -> None:
    """Rounds of one prompt per worker: the policies that look at load spread them, the others rotate."""
    bodies = _primer(task.settings, task.model, workers, task.block_size_tokens, salt)
    for start in range(0, len(bodies), workers):
        outcomes = await asyncio.gather(
            *(
                client.complete(body, request_id=f"{arm.name}:{name}", session_id=name)
                for name, body in bodies[start : start + workers]
            )
        )
        for outcome in outcomes:
            if outcome.failure is not None:
                raise PrimerError(f"a primer request of arm {arm.name} failed: {outcome.failure}")


def _primer(
    settings: RunSettings, model: str, workers: int, block_size_tokens: int, salt: str | None
) -> list[tuple[str, bytes]]:
    synth = PromptSynth(settings.seed, block_size_tokens, {})
    names = [
        f"{PRIMER_SESSION}-{turn}-{worker}"
        for turn in range(settings.primer_prompts_per_worker)
        for worker in range(workers)
    ]
    return [
        (name, completion_body(model, synth.unrelated(name, settings.primer_tokens), 2, cache_salt=salt))
        for name in names
    ]


def _seen_before(samples: Sequence[Sample], plan: Plan, block_size_tokens: int) -> dict[str, int]:
    """Of every prompt, what an earlier one of the same arm had contained; by request id, in the order of sending."""
    prompts = {session.session_id: session.turns for session in plan.sessions}
    seen = SeenBefore(block_size_tokens)
    in_order = sorted(samples, key=lambda sample: sample.sent_ms)
    return {sample.request_id: seen.take(prompts[sample.session_id][sample.turn].token_ids) for sample in in_order}


def _schedule_digest(plan: Plan, samples: Sequence[Sample]) -> str:
    """Over what the arm had to send and when, of the turns that it really sent: equal for arms that can be compared."""
    turns = {(session.session_id, at): turn for session in plan.sessions for at, turn in enumerate(session.turns)}
    summed = hashlib.sha256()
    for key in sorted((sample.session_id, sample.turn) for sample in samples):
        turn = turns[key]
        planned = (*key, turn.due_ms, turn.think_ms, turn.max_tokens, int(turn.token_ids.size))
        summed.update(msgspec.json.encode(planned))
    return summed.hexdigest()
