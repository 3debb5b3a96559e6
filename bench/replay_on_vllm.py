"""Three policies over two real vLLM workers on CPU, by `kvrelay replay` with gates that were locked before.

    python -m bench.replay_on_vllm --out DIR        about five minutes; leave the machine alone meanwhile

The workers run for the whole time; arms are kept apart by a cache salt, and the engines' own counters say whether that
held. Exit status: that of the replay (0 pass, 1 fail, 3 unknown).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.real.engine import VllmWorker, installed

from bench.rig.engines import SMALL_CUT, pair, running, write_fleet
from kvrelay.edge.system.ports import spare_port

BLOCKS = 640
GATES = Path(__file__).with_name("replay_on_vllm_gates.toml")
POLICIES = ("round_robin", "sticky", "cache_load")


def main() -> int:
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    engine = installed("wide")
    with tempfile.TemporaryDirectory(prefix="replay-") as place:
        folder = Path(place)

        def make(name: str, cpu: int) -> VllmWorker:
            return VllmWorker(engine, name, port=spare_port(), cpu=cpu, folder=folder, blocks=BLOCKS)

        with running(pair(make)) as workers:
            return _replay(write_fleet(workers, engine.model, folder), options)


def _replay(fleet: Path, options: argparse.Namespace) -> int:
    kvrelay = [sys.executable, "-m", "kvrelay.cli.main"]
    subprocess.run([*kvrelay, "gates", "lock", str(GATES)], check=True)
    policies = [word for policy in POLICIES for word in ("--policy", policy)]
    command = [
        *kvrelay, "replay", "bundled", *policies, "--repeats", str(options.repeats), "--reset", "cache_salt",
        "--fleet", str(fleet), "--gates", str(GATES), "--out", str(options.out), "--seed", str(options.seed),
        "--max-sessions", str(options.sessions), *SMALL_CUT,
    ]  # fmt: skip
    return subprocess.run(command, check=False).returncode


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.replay_on_vllm")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
