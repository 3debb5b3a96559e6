"""What kvrelay needs and vLLM's own environment lacks, in a folder beside it: nothing in that environment changes."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.real.engine import Engine, EngineUnavailable

PACKAGES = ("xxhash>=3.4", "lz4>=4.3", "zstandard>=0.22", "obstore>=0.6")
SOURCE = Path(__file__).parents[2] / "src"


def python_path(engine: Engine) -> str:
    """For PYTHONPATH of a process that runs vLLM with us in it; installs on first use."""
    folder = engine.python.parents[2] / "kvrelay-needs"
    done = folder / "installed"
    if not done.exists():
        command = [str(engine.python), "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *PACKAGES]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise EngineUnavailable(f"installing {', '.join(PACKAGES)} failed:\n{ended.stderr[-2000:]}")
        done.touch()
    return f"{SOURCE}:{folder}"
