"""Two real vLLM workers on CPU as a staging fleet for drills, started as the drill needs them, with their fleet file.

Drills differ in what they need of the engines, so there are several stagings; each is two workers, one core each.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import tests.real
from msgspec import Struct
from tests.real.engine import BLOCK_SIZE, MODEL_NAME, Engine, VllmWorker, installed
from tests.real.kv_worker import CHUNK_TOKENS, KvWorker

from bench.rig.engines import running
from kvrelay.edge.system.ports import spare_port
from kvrelay.lab.drills.drill import StorePlan
from kvrelay.lab.drills.fleets.shared_store import DEADLINE_MS, store_options
from kvrelay.lab.drills.fleets.staging_file import is_alive

ADAPTER = "ad-x"  # as the drills call it
NEW_REVISION = "v2"

DRILLS: Mapping[str, tuple[str, ...]] = {
    "plain": (
        "worker-loss",
        "hot-prefix",
        "gateway-restart",
        "gap-inner",
        "gap-unfilled",
        "gap-tail",
        "gap-dead",
        "stale-session",
        "rotation-tokenizer",
        "rotation-template",
        "rotation-tenant-policy",
    ),
    "versions": ("rolling-update", "rotation-revision"),
    "tenants": ("rolling-update-tenants",),
    "adapter": ("rotation-adapter",),
    "recompute": ("store-outage", "store-stall", "store-herd", "rollback"),
    "fail": ("store-outage-fail",),
    "fallback": ("store-outage-fallback",),
}
"""By staging. `tenants` and the last three share a tier; those three differ in the policy for loads that fail."""


class Staging(Struct, frozen=True):
    """A running fleet: its file, and what `kvrelay drill run` has to be told besides."""

    file: Path
    confirmed: tuple[str, ...]


class _WithAdapter(VllmWorker):
    adapter: Path

    def more_arguments(self) -> tuple[str, ...]:
        return "--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"{ADAPTER}={self.adapter}"


@contextmanager
def staged(name: str) -> Iterator[Staging]:
    """Raises EngineUnavailable."""
    engine = installed()
    with tempfile.TemporaryDirectory(prefix="drills-") as place:
        folder, port = Path(place), spare_port()
        workers = _workers(name, engine, folder, port)
        before = os.environ.get("VLLM_SERVER_DEV_MODE")
        os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # caches can be reset then
        try:
            with running(workers):
                yield _staging(name, workers, folder, port)
        finally:
            _end_restarted(folder)
            if before is None:
                del os.environ["VLLM_SERVER_DEV_MODE"]


def _workers(name: str, engine: Engine, folder: Path, store_port: int) -> Sequence[VllmWorker]:
    match name:
        case "plain":
            return [
                VllmWorker(engine, each, port=spare_port(), cpu=cpu, folder=folder) for cpu, each in enumerate("ab")
            ]
        case "versions":
            models = _versions(engine, folder)
            return [VllmWorker(models[n], "ab"[n], port=spare_port(), cpu=n, folder=folder) for n in range(2)]
        case "tenants":
            models = _versions(engine, folder)
            return [_sharing("recompute", models[n], "ab"[n], n, folder, store_port) for n in range(2)]
        case "adapter":
            _run(engine, "make_adapter.py", str(engine.model), str(folder / ADAPTER), "1")
            pair = [
                _WithAdapter(engine, each, port=spare_port(), cpu=cpu, folder=folder) for cpu, each in enumerate("ab")
            ]
            for worker in pair:
                worker.adapter = folder / ADAPTER
            return pair
        case _:
            return [_sharing(name, engine, each, cpu, folder, store_port) for cpu, each in enumerate("ab")]


def _versions(engine: Engine, folder: Path) -> tuple[Engine, Engine]:
    """The same architecture and tokenizer with two draws of weights."""
    newer = Engine(engine.python, folder / "model-v2")
    _run(engine, "make_model.py", "tiny", str(newer.model), "8")
    return engine, newer


def _sharing(policy: str, engine: Engine, name: str, cpu: int, folder: Path, store_port: int) -> KvWorker:
    """As the mock workers of a drill with a store are started."""
    plan = StorePlan(failure_policy=policy, below=policy == "fallback")
    store = store_options(plan, remote_url=f"peer://127.0.0.1:{store_port}", below_url=f"file://{folder}/below")
    connector = {"store": store, "chunk_tokens": CHUNK_TOKENS, "digest_cache": str(folder / "digests.json")}
    connector["lookup_deadline_ms"] = DEADLINE_MS
    return KvWorker(
        engine,
        name,
        port=spare_port(),
        report_port=spare_port(),
        cpu=cpu,
        folder=folder,
        connector=connector,
        adapters={},
        environment={},
        load_failure_policy="fail" if policy == "fail" else "recompute",
    )


def _staging(name: str, workers: Sequence[VllmWorker], folder: Path, store_port: int) -> Staging:
    lines = ["staging = true", 'namespace = "bench"', f'model = "{MODEL_NAME}"', f"block_size = {BLOCK_SIZE}"]
    if isinstance(workers[0], KvWorker):
        policy = "recompute" if name == "tenants" else name
        lines += ["[store]", f'listen = "127.0.0.1:{store_port}"', f'failure_policy = "{policy}"']
    confirmed: list[str] = []
    for number, worker in enumerate(workers):
        assert worker._process is not None
        pid = worker._process.pid
        start = _start_script(pid, folder / f"start-{worker.name}.sh")
        lines += ["[[workers]]", f'url = "{worker.url}"', f"pid = {pid}", f'start = "bash {start}"', 'adapter = "vllm"']
        lines += [f'events = "{worker.events}"', f'replay = "{worker.replay}"']
        if isinstance(worker, KvWorker):
            lines.append(f'kv_report = "{worker.report}"')
        if name in ("versions", "tenants") and number:
            lines.append(f'revision = "{NEW_REVISION}"')
        confirmed += ["--confirm", f"w{number}={pid}"]
    file = folder / "fleet.toml"
    file.write_text("\n".join(lines) + "\n")
    return Staging(file, tuple(confirmed))


def _run(engine: Engine, script: str, *arguments: str) -> None:
    path = str(Path(tests.real.__file__).with_name(script))
    subprocess.run([str(engine.python), path, *arguments], check=True, stdout=subprocess.DEVNULL)


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
        if is_alive(pid):
            os.killpg(pid, signal.SIGKILL)
