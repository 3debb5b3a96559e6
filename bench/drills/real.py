"""Drills on two real vLLM workers on CPU: `python -m bench.drills.real [DRILL]... [--out DIR]`.

Starts them as the real tests do, once per staging that the drills need (`staging.py`), writes the fleet file with a
command that starts each again, and runs `kvrelay drill` on it as an operator would, every target confirmed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from bench.drills.staging import DRILLS, staged


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.drills.real")
    known = sorted(name for drills in DRILLS.values() for name in drills)
    parser.add_argument("names", nargs="*", metavar="DRILL", help=f"none: all of {', '.join(known)}")
    parser.add_argument("--out", type=Path, default=Path("kvrelay-drills-real"))
    options = parser.parse_args()
    names, out = options.names, options.out
    if unknown := set(names) - set(known):
        parser.error(f"no such drill here: {', '.join(sorted(unknown))}")
    worst = 0
    for staging, drills in DRILLS.items():
        wanted = [name for name in drills if not names or name in names]
        if wanted:
            with staged(staging) as fleet:
                command = [sys.executable, "-m", "kvrelay.cli.main", "drill", "run", *wanted]
                command += ["--fleet", str(fleet.file), *fleet.confirmed, "--out", str(out)]
                worst = max(worst, subprocess.run(command, check=False).returncode)
    return worst


if __name__ == "__main__":
    raise SystemExit(main())
