"""A sweep over two weight vectors on one half of the sessions, confirmed on the other, through real gateways."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.covers("RT-12")
def test_sweep_names_its_rule_and_picks_by_it(tmp_path: Path) -> None:
    vectors = ["1,0.002,0.005,0.05", "0,0.02,0.05,0.05"]
    asked = [word for vector in vectors for word in ("--weights", vector)]
    options = ["--demo", "--json", "--slo-ttft-p95-ms", "60000", "--out", str(tmp_path), *asked]
    ended = subprocess.run(
        [sys.executable, "-m", "kvrelay.cli.main", "tune", *options],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)

    assert [result["vectors"][vector]["outcome"] for vector in vectors] == ["pass", "pass"]
    assert result["pick"] == {"alpha": 1.0, "beta": 0.002, "gamma": 0.005, "delta": 0.05}
    hits = [result["vectors"][vector]["actual_cached_tokens"] for vector in vectors]
    assert hits[0] > 1.2 * hits[1]
    assert result["manifest"]["stated"]["rule"] == result["rule"]
    assert result["confirmed"] == "pass"
    assert set(result["held_out"]["policies"]) == {"round_robin", vectors[0]}
    config = (tmp_path / "training" / "arms" / f"{vectors[1]}-0" / "gateway.toml").read_text()
    assert 'scorer = "weights"' in config and "alpha = 0.0" in config
