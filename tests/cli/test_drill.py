"""`kvrelay drill` as a user calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from kvrelay.lab.drills.catalog import ALL

COMMAND = [sys.executable, "-m", "kvrelay.cli.main", "drill"]


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], check=False, capture_output=True, text=True, timeout=100)


def test_drills_are_listed_and_run_with_their_pages(tmp_path: Path) -> None:
    assert [each["name"] for each in json.loads(call("list", "--json").stdout)] == list(ALL)
    ended = call("run", "gap-inner", "stale-session", "--json", "--out", str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    results = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [(each["drill"], each["verdict"]) for each in results] == [("gap-inner", "pass"), ("stale-session", "pass")]
    page = (tmp_path / "gap-inner.md").read_text()
    for heading in ("## Target", "## Baseline", "## What is broken", "## Rollback", "## Acceptance", "## Evidence"):
        assert heading in page
    assert "<svg" in (tmp_path / "gap-inner.html").read_text()
    assert json.loads((tmp_path / "gap-inner.json").read_text())["history"]["deeds"]


def test_wrong_names_are_refused_with_the_nearest_right_one() -> None:
    ended = call("run", "worker-los")
    assert ended.returncode == 2 and "did you mean `worker-loss`?" in ended.stderr


def test_fuzzing_says_its_seeds_and_what_it_played() -> None:
    ended = call("fuzz", "--seeds", "3", "--first-seed", "7100", "--json")
    assert ended.returncode == 0 and "seeds 7100 to 7102" in ended.stderr
    assert json.loads(ended.stdout)["played"] == 3


PLAIN_INSTALL = """
import sys
sys.modules.update(dict.fromkeys(("cryptography", "lz4", "zstandard")))
sys.argv = ["kvrelay", "drill", *sys.argv[1:]]
from kvrelay.cli.main import main
main()
"""
ENCRYPTED = "a fuzzed fleet whose store is encrypted needs the package `cryptography`"


def test_a_plain_install_drills_stores_and_says_what_it_lacks_for_encrypted_ones() -> None:
    command = [sys.executable, "-c", PLAIN_INSTALL]
    drill = subprocess.run([*command, "run", "store-outage"], check=False, capture_output=True, text=True, timeout=100)
    assert drill.returncode == 0, drill.stdout
    fuzz = subprocess.run([*command, "fuzz", "--seeds", "3"], check=False, capture_output=True, text=True, timeout=100)
    assert fuzz.returncode == 2
    assert fuzz.stderr == f"error: {ENCRYPTED}: pip install 'kvrelay[store]'\n"
