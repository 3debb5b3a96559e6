"""`kvrelay dashboard`: what it prints is what is kept, and a runbook knows gates and drills."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvrelay.cli.main import app
from kvrelay.lab.drills.catalog import ALL

ROOT = Path(__file__).parents[2]
GATES = """
title = "chat"
candidate = "cache_load"
baseline = "sticky"
baseline_run = "this-run"

[[gate]]
name = "waiting"
metric = "ttft_p95_ms"
at_most_ratio = 0.9
"""


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["dashboard", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.covers("TP-12")
def test_files_are_printed_as_they_are_kept() -> None:
    assert run("grafana") == (ROOT / "deploy/grafana/kvrelay.json").read_text()
    assert run("alerts") == (ROOT / "deploy/prometheus/kvrelay.rules.yml").read_text()
    assert run("metrics") == (ROOT / "docs/metrics.md").read_text()
    assert 'runbook_url: "https://wiki.example/kv#router"' in run("alerts", "--runbooks", "https://wiki.example/kv")


@pytest.mark.covers("OP-14")
def test_a_runbook_states_the_gates_as_target_and_has_acceptance_for_every_drill(tmp_path: Path) -> None:
    (tmp_path / "gates.toml").write_text(GATES)
    text = run("runbook", "--gates", str(tmp_path / "gates.toml"))
    assert "- waiting: `ttft_p95_ms` at most 0.9 times that of the baseline\n" in text
    for name in ALL:
        assert f"\n| `{name}` | " in text
    assert "Not taken. Name a running gateway" in text


def test_gates_that_are_none_are_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "gates.toml").write_text("gate = 3")
    result = CliRunner().invoke(app, ["dashboard", "runbook", "--gates", str(tmp_path / "gates.toml")])
    assert result.exit_code == 2 and result.stderr.startswith("error: ")
