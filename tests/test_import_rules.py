"""The rule that core computes and does nothing else is enforced, not only stated."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("smuggled", "broken"), [("", False), ("import time", True), ("from kvrelay.edge.system import clock", True)]
)
def test_an_import_that_core_must_not_have_makes_lint_fail(tmp_path, smuggled, broken):
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    module = tmp_path / "src/kvrelay/core/policy/random.py"
    module.write_text(module.read_text() + f"\n{smuggled}\n")
    lint = Path(sys.executable).with_name("lint-imports")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(
        [lint, "--no-cache"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (run.returncode != 0) == broken, run.stdout
    assert not broken or "kvrelay.core.policy.random" in run.stdout
