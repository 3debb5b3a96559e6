"""A long run in which everything that can fail does.

    python -m bench.soak --minutes 10 --streams 200 [--policy cache_load] [--migrate] [--harsh] [--json FILE]

A real gateway process before mock worker processes: many concurrent streams, clients that leave half-way, a worker
killed every 20 seconds (SIGKILL and SIGTERM in turn), five requests in a hundred struck by a fault. Mock workers: this
says how the gateway behaves, nothing about any engine's speed. Exit code 1 when a promise is broken, 3 when one stayed
unknown.

With `--migrate` streams outlive their workers, and a dead worker is no excuse for a broken one. `--harsh` does the same
with three workers and nine faults in a hundred: of kinds that suspend workers and cut all their connections, so the
budget for retries is raised, and a request that failed everywhere is excused more often.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvloop

from bench.soak.checker import HARSH_REFUSED_BY_ALL_RATIO, REFUSED_BY_ALL_RATIO, History, Verdict, judge
from bench.soak.clients import Crowd, Habits, WatchedClient
from bench.soak.nemesis import FAULTS, HARSH_FAULTS, Nemesis
from bench.soak.watch import Moment, ask_json, ask_text, look, until_quiet, watch
from kvrelay.core.receipts.receipt import Receipt
from kvrelay.edge.observe.receipt_file import read_receipts
from kvrelay.edge.worker.launch import MockFleet, RunningWorker
from kvrelay.edge.worker.spec import MockSpec
from kvrelay.lab.arms.gateway_process import GatewayProcess

WORKERS, HARSH_WORKERS = 4, 3
KILL_EVERY_S, DOWN_S = 20.0, 2.0
REST_S = 6.0  # longer than kept connections live
CLIENT_TIMEOUT_S = 120.0


class Report(msgspec.Struct, kw_only=True):
    """What is printed and written."""

    label: str = "mock"
    seed: int
    policy: str
    migrate: bool
    harsh: bool
    minutes: float
    streams: int
    requests: int
    tokens: int
    deaths: int
    restarts: int
    gateway_cpu_s: float
    load_average_before: float
    verdicts: list[Verdict]
    moments: list[Moment]


def main() -> int:
    asked = _arguments()
    print(f"seed {asked.seed}", file=sys.stderr)
    folder = Path(tempfile.mkdtemp(prefix="kvrelay-soak-"))
    try:
        report = uvloop.run(_soak(asked, folder))
    finally:
        if asked.keep:
            print(f"kept: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder)
    print(_table(report))
    if asked.json is not None:
        asked.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    verdicts = {each.verdict for each in report.verdicts}
    return 1 if "fail" in verdicts else 3 if "unknown" in verdicts else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.soak")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--policy", default="cache_load")
    parser.add_argument("--migrate", action="store_true", help="continue streams of dead workers on others")
    parser.add_argument("--harsh", action="store_true", help="migrate, three workers, nine faults in a hundred")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report with all samples")
    parser.add_argument("--keep", action="store_true", help="keep receipts and log of the run")
    asked = parser.parse_args()
    asked.migrate |= asked.harsh
    return asked


async def _soak(asked: argparse.Namespace, folder: Path) -> Report:
    seconds = asked.minutes * 60
    load_average = os.getloadavg()[0]
    log = folder / "gateway.log"
    workers, faults = (HARSH_WORKERS, HARSH_FAULTS) if asked.harsh else (WORKERS, FAULTS)
    async with MockFleet(_spec(number, asked.seed, faults) for number in range(workers)) as fleet:
        config = _write_config(folder, fleet.workers, asked)
        async with GatewayProcess(config, log=log, ready_timeout_s=30.0) as gateway:
            names = [worker.name for worker in fleet.workers]
            await gateway.wait_for_workers(names)
            pid, admin_url = gateway.ready.pid, gateway.ready.admin_url
            fds_at_rest = await _fds_at_rest(pid, over_s=2.0)
            nemesis = Nemesis(fleet, every_s=KILL_EVERY_S, down_s=DOWN_S)
            moments: list[Moment] = []
            async with WatchedClient(gateway.ready.url, timeout_s=CLIENT_TIMEOUT_S) as client:
                crowd = Crowd(client, Habits(seed=asked.seed), streams=asked.streams)
                watching = asyncio.ensure_future(watch(pid, lambda: crowd.open_streams, moments))
                await asyncio.gather(crowd.run(seconds), nemesis.run(seconds))
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                await nemesis.heal()
                await gateway.wait_for_workers(names)
                await crowd.repeat_prompts("first-look", at_once=8)
                await asyncio.sleep(1.0)
                repeated = await crowd.repeat_prompts("second-look", at_once=8)
            await asyncio.sleep(REST_S)
            history = History(
                sent=crowd.sent,
                receipts=(),
                deaths=nemesis.deaths,
                status_at_end=await until_quiet(admin_url, within_s=2.0),
                metrics_at_end=await ask_text(f"{admin_url}/metrics"),
                repeated=frozenset(sent.request_id for sent in repeated),
                wrong_reuse_blocks=await _wrong_reuse_blocks(fleet.workers),
                moments=moments,
                migrates=asked.migrate,
                refused_by_all_ratio=HARSH_REFUSED_BY_ALL_RATIO if asked.harsh else REFUSED_BY_ALL_RATIO,
                warm_up_s=max(20.0, seconds / 4),
                fds_at_rest=fds_at_rest,
                fds_at_end=await _fds_at_rest(pid, over_s=2.0),
            )
            cpu_s = look(pid, 0).cpu_s
    history.receipts = _read_all_receipts(folder)
    history.gateway_log = log.read_text(errors="replace")
    return Report(
        seed=asked.seed,
        policy=asked.policy,
        migrate=asked.migrate,
        harsh=asked.harsh,
        minutes=asked.minutes,
        streams=asked.streams,
        requests=len(crowd.sent),
        tokens=sum(len(sent.outcome.token_times_s) for sent in crowd.sent if sent.outcome is not None),
        deaths=len(nemesis.deaths),
        restarts=nemesis.restarts,
        gateway_cpu_s=cpu_s,
        load_average_before=load_average,
        verdicts=judge(history),
        moments=moments,
    )


def _spec(number: int, seed: int, faults: Sequence[dict[str, object]]) -> MockSpec:
    return MockSpec(
        name=f"soak-{number}",
        blocks=3072,
        prefill_tokens_per_s=20_000.0,
        decode_ms=40.0,
        seed=seed + number,
        drain_s=15.0,
        faults=tuple(faults),
    )


def _write_config(folder: Path, workers: Sequence[RunningWorker], asked: argparse.Namespace) -> Path:
    lines = [
        "[gateway]",
        "port = 0",
        "admin_port = 0",
        f"policy = {json.dumps(asked.policy)}",
        *(["[gateway.timeouts]", "first_byte_s = 5", "idle_s = 2"] if asked.harsh else []),
        "[retry]",
        f"attempts = {len(workers)}",
        f"migrate = {json.dumps(asked.migrate)}",
        *(["budget_ratio = 2.0"] if asked.harsh else []),
        "[receipts]",
        f"path = {json.dumps(str(folder / 'receipts.jsonl'))}",
        "keep = 1000",
    ]
    for worker in workers:
        lines += ["[[workers]]", f"name = {json.dumps(worker.name)}", f"url = {json.dumps(worker.url)}"]
        lines += ['adapter = "mock"']
    path = folder / "gateway.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


async def _fds_at_rest(pid: int, *, over_s: float) -> int:
    """The fewest seen for a while: probes come and go."""
    until_s = time.monotonic() + over_s
    fewest = look(pid, 0).open_fds
    while time.monotonic() < until_s:
        await asyncio.sleep(0.05)
        fewest = min(fewest, look(pid, 0).open_fds)
    return fewest


async def _wrong_reuse_blocks(workers: Sequence[RunningWorker]) -> int:
    states = [await ask_json(f"{worker.url}/mock/state") for worker in workers]
    return sum(state["wrong_reuse_blocks"] for state in states)


def _read_all_receipts(folder: Path) -> list[Receipt]:
    return [receipt for path in sorted(folder.glob("receipts.jsonl*")) for receipt in read_receipts(path)]


def _table(report: Report) -> str:
    lines = [
        f"soak (mock workers): {report.minutes:g} min, {report.streams} streams, policy {report.policy}"
        f"{', streams migrate' if report.migrate else ''}{', harsh' if report.harsh else ''}, seed {report.seed}",
        f"  {report.requests} requests, {report.tokens} streamed tokens, {report.deaths} worker deaths,"
        f" {report.restarts} restarts; gateway CPU {report.gateway_cpu_s:.1f} s;"
        f" load average before {report.load_average_before:.1f}",
        "",
    ]
    lines += [f"{each.verdict:<8} {each.promise:<60} {each.observed}" for each in report.verdicts]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
