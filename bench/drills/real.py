"""Drills on two real vLLM workers on CPU: `python -m bench.drills.real [DRILL]... [--out DIR]`.

Starts them as the real tests do, writes the fleet file with a command that starts each again, and runs `kvrelay drill`
on it as an operator would, every target confirmed.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.real.conftest import free_port
from tests.real.engine import BLOCK_SIZE, MODEL_NAME, VllmWorker, installed

from kvrelay.lab.drills.fleets.attached import _alive

DRILLS = ["worker-loss", "hot-prefix", "gateway-restart", "gap-inner", "gap-tail", "stale-session", "rotation-template"]


def main() -> int:
    names = [name for name in sys.argv[1:] if not name.startswith("-")] or DRILLS
    out = Path(names.pop()) if "--out" in sys.argv else Path("kvrelay-drills-real")
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # caches can be reset then
    engine = installed()
    with tempfile.TemporaryDirectory(prefix="drills-") as name:
        folder = Path(name)
        workers = [VllmWorker(engine, each, port=free_port(), cpu=cpu, folder=folder) for cpu, each in enumerate("ab")]
        try:
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.wait_until_up()
            file, confirmed = _fleet_file(workers, folder)
            command = [sys.executable, "-m", "kvrelay.cli.main", "drill", "run", *(names or DRILLS)]
            return subprocess.run(
                [*command, "--fleet", str(file), *confirmed, "--out", str(out)], check=False
            ).returncode
        finally:
            for worker in workers:
                worker.kill()
            _end_restarted(folder)


def _fleet_file(workers: list[VllmWorker], folder: Path) -> tuple[Path, list[str]]:
    lines = ["staging = true", 'namespace = "bench"', f'model = "{MODEL_NAME}"', f"block_size = {BLOCK_SIZE}"]
    confirmed: list[str] = []
    for number, worker in enumerate(workers):
        assert worker._process is not None
        pid = worker._process.pid
        start = _start_script(pid, folder / f"start-{worker.name}.sh")
        lines += ["[[workers]]", f'url = "{worker.url}"', f"pid = {pid}", f'start = "bash {start}"', 'adapter = "vllm"']
        lines += [f'events = "{worker.events}"', f'replay = "{worker.replay}"']
        confirmed += ["--confirm", f"w{number}={pid}"]
    file = folder / "fleet.toml"
    file.write_text("\n".join(lines) + "\n")
    return file, confirmed


def _start_script(pid: int, path: Path) -> Path:
    """As it was started: its arguments and environment, and its new PID beside it, so that we can end it."""
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    environment = [each for each in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if b"=" in each]
    words = " ".join(shlex.quote(each.decode()) for each in [b"env", b"-i", *environment, *arguments])
    path.write_text(f"echo $$ > {path}.pid\nexec {words}\n")
    return path


def _end_restarted(folder: Path) -> None:
    for file in folder.glob("*.pid"):
        pid = int(file.read_text())
        if _alive(pid):
            os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    raise SystemExit(main())
