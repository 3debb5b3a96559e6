"""The soak in short: every policy, with clients that leave, faults in five requests of a hundred, workers that die.

The clients, the breaker and the judge are those of `python -m bench.soak`; here the gateway runs in this process, so
that its tasks can be counted too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals

import pytest
from bench.soak.checker import History, judge
from bench.soak.clients import Crowd, Habits, WatchedClient
from bench.soak.nemesis import FAULTS, Nemesis
from bench.soak.watch import ask_json, ask_text, until_quiet

from kvrelay.core.model.units import Status
from kvrelay.edge.gateway.gateway import Gateway
from kvrelay.edge.observe.receipt_file import read_receipts
from kvrelay.edge.system.config import load_config
from kvrelay.edge.worker.launch import MockFleet
from kvrelay.edge.worker.spec import MockSpec
from tests.edge.gateway.scripted import until

SEED = 11
SECONDS, STREAMS, MOST_ROUNDS = 2.0, 16, 8
NOT_WATCHED_HERE = {"memory flat within 10 % after the warm-up", "no socket or descriptor left open"}


@pytest.fixture(scope="module")
def fleet() -> Iterator[MockFleet]:
    specs = [
        MockSpec(
            name=f"f{number}",
            blocks=2048,
            prefill_tokens_per_s=50_000.0,
            decode_ms=4.0,
            seed=SEED + number,
            drain_s=5.0,
            faults=tuple(FAULTS),
        )
        for number in range(4)
    ]
    with MockFleet(specs) as fleet:
        yield fleet


@asynccontextmanager
async def serving(fleet: MockFleet, policy: str, receipts: Path, *, migrate: bool) -> AsyncIterator[Gateway]:
    settings = {
        "workers": [{"name": worker.name, "url": worker.url, "adapter": "mock"} for worker in fleet.workers],
        "gateway.port": 0,
        "gateway.admin_port": 0,
        "gateway.policy": policy,
        "health.interval_s": 0.1,
        "retry.attempts": len(fleet.workers),
        "retry.migrate": migrate,
        "receipts.path": receipts,
    }
    async with Gateway(load_config(Path("/dev/null"), {}, settings), seed=SEED, key_seed=b"test") as gateway:
        await until(lambda: sum(worker.routable for worker in gateway.status().workers) == len(fleet.workers))
        yield gateway


@pytest.mark.covers("S01", "S25", "S26", "S27", "RC-11")
@pytest.mark.parametrize(
    ("policy", "signals", "migrate"),
    [
        ("round_robin", (SIGKILL, SIGTERM), False),
        ("sticky", (SIGTERM, SIGKILL), False),
        ("cache_load", (SIGKILL, SIGTERM), False),
        ("cache_load", (SIGKILL, SIGKILL), True),
    ],
)
async def test_every_request_ends_once_whatever_fails(
    fleet: MockFleet,
    policy: str,
    signals: tuple[Signals, ...],
    migrate: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvrelay")
    nemesis = Nemesis(fleet, every_s=0.6, down_s=0.05, signals=signals)
    file = tmp_path / "receipts.jsonl"
    async with serving(fleet, policy, file, migrate=migrate) as gateway:
        tasks_at_rest = len(asyncio.all_tasks())
        async with WatchedClient(gateway.url, timeout_s=30.0) as client:
            crowd = Crowd(client, Habits(seed=SEED, abort_after_s=(0.002, 0.2)), streams=STREAMS)
            for _ in range(MOST_ROUNDS):
                await nemesis.spoil()
                await asyncio.gather(crowd.run(SECONDS), nemesis.run(SECONDS))
                if _something_of_everything(gateway, nemesis):
                    break
            assert _something_of_everything(gateway, nemesis)
            await until(lambda: _all_live(gateway, fleet), within_s=20.0)
            await crowd.repeat_prompts("first-look", at_once=4)
            await asyncio.sleep(0.1)
            repeated = await crowd.repeat_prompts("second-look", at_once=4)
        status = await until_quiet(gateway.admin_url, within_s=10.0)
        metrics = await ask_text(f"{gateway.admin_url}/metrics")
        await until(lambda: len(asyncio.all_tasks()) <= tasks_at_rest)
        gateway.router.check()
        gateway.receipts.flush()
        wrong_reuse = [(await ask_json(f"{worker.url}/mock/state"))["wrong_reuse_blocks"] for worker in fleet.workers]
        history = History(
            sent=crowd.sent,
            receipts=list(read_receipts(file)),
            deaths=nemesis.deaths,
            status_at_end=status,
            metrics_at_end=metrics,
            repeated=frozenset(sent.request_id for sent in repeated) if policy == "cache_load" else frozenset(),
            wrong_reuse_blocks=sum(wrong_reuse),
            gateway_log=caplog.text,
            migrates=migrate,
        )
    verdicts = judge(history)
    assert [each for each in verdicts if each.verdict == "fail"] == []
    unknown = {each.promise for each in verdicts if each.verdict == "unknown"}
    assert {promise for promise in unknown if not promise.startswith("after healing")} == NOT_WATCHED_HERE


def _something_of_everything(gateway: Gateway, nemesis: Nemesis) -> bool:
    """On a busy machine few requests fit into a round."""
    statuses = {receipt.status for receipt in gateway.receipts.recent(1000)}
    return bool(nemesis.deaths) and statuses >= {Status.OK, Status.CLIENT_CANCELLED}


def _all_live(gateway: Gateway, fleet: MockFleet) -> bool:
    alive = {worker.name: worker.incarnation for worker in fleet.workers}
    seen = {worker.name: worker.incarnation for worker in gateway.status().workers if worker.routable}
    return seen == alive
