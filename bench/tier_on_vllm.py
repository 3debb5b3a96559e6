"""A CPU tier behind two real vLLM workers: the arms of `kvrelay plan`, one run each, and `kvrelay verdict` over both.

    python -m bench.tier_on_vllm --out DIR        about five minutes; leave the machine alone meanwhile

The engines' own pools are small on purpose: what they evict is what a tier can bring back. The workers are started once
without the tier and once with the arguments that the plan writes for it; nothing else differs. Exit status: that of the
verdict (0 keep, 1 drop, 3 unknown).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.real.beside_vllm import python_path
from tests.real.engine import Engine, VllmWorker, installed

from bench.rig.engines import SMALL_CUT, pair, running, write_fleet
from kvrelay.edge.stores.audit import purge
from kvrelay.edge.stores.config import open_store
from kvrelay.edge.system.ports import spare_port
from kvrelay.lab.arms.contender import Contender
from kvrelay.lab.plan.tiers import MEMORY_URL, Wanted, tier_plan, write_plan

BLOCKS = 96
CPU_BYTES = 2 * 10**9
KVRELAY = [sys.executable, "-m", "kvrelay.cli.main"]


class ArmWorker(VllmWorker):
    """Started with the arguments of an arm."""

    arm: Contender

    def more_arguments(self) -> tuple[str, ...]:
        return self.arm.engine_args

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), "PYTHONPATH": python_path(self._engine)}


def main() -> int:
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    engine = installed("wide")
    wanted = Wanted(step="cpu", policy="cache_load", engine="vllm", cpu_bytes=CPU_BYTES, remote="")
    plan = tier_plan(wanted, out=options.out)
    write_plan(plan, options.out)
    try:
        for arm in plan.arms:
            status = _measure(engine, arm, options)
            if status not in (0, 3):
                return status
    finally:
        _empty(MEMORY_URL)
    folders = [str(options.out / arm.name) for arm in plan.arms]
    return subprocess.run([*KVRELAY, "verdict", folders[1], "--baseline-run", folders[0]], check=False).returncode


def _empty(url: str) -> None:
    """The tier lies in the host's memory and outlives its workers."""
    store = open_store(url)
    purge(store, url, "this plan's", lambda one: True, deadline_s=30)
    store.close()


def _measure(engine: Engine, arm: Contender, options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="tier-") as place:
        folder = Path(place)

        def make(name: str, cpu: int) -> ArmWorker:
            worker = ArmWorker(engine, name, port=spare_port(), cpu=cpu, folder=folder, blocks=BLOCKS)
            worker.arm = arm
            return worker

        with running(pair(make)) as workers:
            return _replay(write_fleet(workers, engine.model, folder), arm, options)


def _replay(fleet: Path, arm: Contender, options: argparse.Namespace) -> int:
    command = [
        *KVRELAY, "replay", "bundled", "--policy", str(arm.sets["gateway.policy"]), "--repeats", str(options.repeats),
        "--reset", "cache_salt", "--fleet", str(fleet), "--out", str(options.out / arm.name), "--seed", "1",
        "--max-sessions", str(options.sessions), *SMALL_CUT,
    ]  # fmt: skip
    return subprocess.run(command, check=False).returncode


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.tier_on_vllm")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=8)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
