"""`kvrelay doctor` as a command: what it prints, and its exit status."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from click.testing import Result
from typer.testing import CliRunner

from kvrelay.cli.main import app
from kvrelay.core.doctor.rules import RULES
from kvrelay.edge.worker.launch import MockFleet
from kvrelay.edge.worker.spec import MockSpec


@pytest.fixture(scope="module")
def fleet() -> Iterator[MockFleet]:
    with MockFleet([MockSpec(name="a"), MockSpec(name="b", replay="none")]) as fleet:
        yield fleet


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # no kvrelay.toml of somebody else


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_a_healthy_worker_is_told_line_by_line_and_ends_well(fleet: MockFleet) -> None:
    result = run("--worker", fleet.workers[0].url)
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("examining 1 worker; each worker gets two small requests of made-up token ids")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("worker 127.0.0.1:") and "fleet" in lines
    assert "  ok      prefix_caching     48 of 49 tokens hit when sent again" in lines
    assert lines[-1].startswith("verdict: ok (")
    assert "cause:" not in result.stdout and "\x1b" not in result.stdout


def test_a_warning_has_cause_and_fix_and_fails_only_when_strict(fleet: MockFleet) -> None:
    result = run("--worker", fleet.workers[1].url)
    assert result.exit_code == 0
    at = result.stdout.splitlines().index("  WARN    replay             rank 0 has no replay endpoint")
    rule = next(rule for rule in RULES if rule.code == "replay")
    assert result.stdout.splitlines()[at + 1 : at + 3] == [
        f"          cause: {rule.cause}",
        f"          fix (replay): {rule.fix}",
    ]
    assert result.stdout.splitlines()[-1].startswith("verdict: warn (")
    assert run("--worker", fleet.workers[1].url, "--strict").exit_code == 1


def test_json_has_every_finding(fleet: MockFleet) -> None:
    result = run("--worker", fleet.workers[0].url, "--worker", fleet.workers[1].url, "--json")
    report = json.loads(result.stdout)
    assert report["verdict"] == "warn" and report["counts"]["warn"] == 1
    assert {finding["code"] for finding in report["findings"]} == {rule.code for rule in RULES}
    (warned,) = [finding for finding in report["findings"] if finding["verdict"] == "warn"]
    assert (warned["code"], warned["setting"]) == ("replay", "replay") and warned["cause"] and warned["fix"]


@pytest.mark.covers("S23")
def test_a_worker_that_is_down_fails() -> None:
    result = run("--worker", "http://127.0.0.1:1")
    assert result.exit_code == 1
    assert "  FAIL    reachable          connection refused" in result.stdout.splitlines()


def test_without_probes_what_is_essential_stays_unknown(fleet: MockFleet) -> None:
    result = run("--worker", fleet.workers[0].url, "--no-probe")
    assert result.exit_code == 3
    assert "no request is sent" in result.stderr
    assert "  unknown events_heard       no probe was sent, so none was expected" in result.stdout.splitlines()


def test_nothing_to_examine_is_wrong_usage() -> None:
    result = run()
    assert result.exit_code == 2
    assert result.stderr == (
        "error: there is nothing to examine\n"
        "  legal: a configuration with [[workers]], `--worker URL`, or `--router URL` of a gateway's admin port\n"
        "hint: kvrelay doctor --worker http://127.0.0.1:8100\n"
    )


def test_a_gateway_that_does_not_answer_fails() -> None:
    result = run("--router", "http://127.0.0.1:1")
    assert result.exit_code == 1
    assert "  FAIL    router             http://127.0.0.1:1: connection refused" in result.stdout.splitlines()
