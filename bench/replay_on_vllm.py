"""Three policies over two real vLLM workers on CPU, by `kvrelay replay` with gates that were locked before.

    python -m bench.replay_on_vllm --out DIR        about five minutes; leave the machine alone meanwhile

The workers run for the whole time; arms are kept apart by a cache salt, and the engines' own counters say whether that
held. Exit status: that of the replay (0 pass, 1 fail, 3 unknown).
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.real.conftest import free_port
from tests.real.engine import VllmWorker, installed

BLOCKS = 640
GATES = Path(__file__).with_name("replay_on_vllm_gates.toml")
POLICIES = ("round_robin", "sticky", "cache_load")


def main() -> int:
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the workers are ended in that case, too
    engine = installed("wide")
    with tempfile.TemporaryDirectory(prefix="replay-") as folder:
        workers = [
            VllmWorker(engine, name, port=free_port(), cpu=cpu, folder=Path(folder), blocks=BLOCKS)
            for cpu, name in enumerate("ab")
        ]
        try:
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.wait_until_up()
            fleet = Path(folder) / "fleet.toml"
            fleet.write_text(_fleet(workers, engine.model), encoding="utf-8")
            return _replay(fleet, options)
        finally:
            for worker in workers:
                worker.kill()


def _fleet(workers: list[VllmWorker], model: Path) -> str:
    tables = [f"[[workers]]\nname = {json.dumps(one.name)}\nurl = {json.dumps(one.url)}\n" for one in workers]
    return "\n".join([*tables, f"[model]\npath = {json.dumps(str(model))}\n"])


def _replay(fleet: Path, options: argparse.Namespace) -> int:
    """Small enough for one core a worker: 4 tokens stand for a block of the trace, a minute of it for two seconds."""
    kvrelay = [sys.executable, "-m", "kvrelay.cli.main"]
    subprocess.run([*kvrelay, "gates", "lock", str(GATES)], check=True)
    policies = [word for policy in POLICIES for word in ("--policy", policy)]
    command = [
        *kvrelay, "replay", "bundled", *policies, "--repeats", str(options.repeats), "--reset", "cache_salt",
        "--fleet", str(fleet), "--gates", str(GATES), "--out", str(options.out), "--seed", str(options.seed),
        "--block-tokens", "4", "--max-sessions", str(options.sessions), "--max-turns", "4", "--speed", "40",
        "--max-gap-ms", "1500", "--max-output-tokens", "4", "--max-context-tokens", "32000",
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
