"""Results of drills and gates are shown as they are written; the badge needs all drills."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvrelay.edge.observe.ui.results import read_results


def drill(name: str, verdict: str = "pass") -> dict[str, Any]:
    promises = [{"promise": "nobody gets another's answer", "verdict": verdict, "observed": "40 answers compared"}]
    return {"drill": name, "fleet": "mock", "verdict": verdict, "promises": promises, "cannot": None}


GATES = {
    "verdict": "unknown",
    "candidate": "cache_load",
    "baseline": "sticky",
    "label": "mock",
    "promotion": "not_promotable",
    "gates": [{"name": "ttft", "outcome": "pass", "reason": "p95 at most 2 s", "parts": []}],
}


@pytest.mark.covers("OP-13")
def test_all_drills_passed_is_a_badge_and_one_that_did_not_takes_it_away(tmp_path: Path) -> None:
    (tmp_path / "drills.json").write_text(json.dumps([drill("worker_lost"), drill("store_down")]))
    found = read_results(tmp_path)
    assert found.badge and [one.name for one in found.results] == ["worker_lost", "store_down"]
    assert found.results[0].details == (("pass", "nobody gets another's answer: 40 answers compared"),)
    (tmp_path / "more.json").write_text(json.dumps({"drills": [drill("tail_lost", "unknown")]}))
    assert not read_results(tmp_path).badge


@pytest.mark.covers("OP-13")
def test_drills_are_read_as_the_command_prints_them_and_verdicts_out_of_summaries(tmp_path: Path) -> None:
    lines = [json.dumps(drill(name)) for name in ("worker-loss", "tail-loss")]
    (tmp_path / "drills.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "summary.json").write_text(
        json.dumps({"label": "mock", "verdict": {"winner": "sticky"}, "gates": GATES})
    )
    found = read_results(tmp_path)
    assert [(one.kind, one.name) for one in found.results] == [
        ("drill", "worker-loss"),
        ("drill", "tail-loss"),
        ("gates", "cache_load against sticky"),
    ]
    assert found.badge and found.unreadable == ()


def test_gates_are_shown_beside_and_earn_no_badge(tmp_path: Path) -> None:
    (tmp_path / "gates.json").write_text(json.dumps(GATES))
    found = read_results(tmp_path)
    (gates,) = found.results
    assert (gates.kind, gates.name, gates.verdict) == ("gates", "cache_load against sticky", "unknown")
    assert gates.details == (("pass", "ttft: p95 at most 2 s"),)
    assert not found.badge


def test_what_is_no_result_is_left_alone_and_what_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"verdict": "pass", "findings": []}')
    (tmp_path / "torn.json").write_text('{"drill": "x", ')
    found = read_results(tmp_path)
    assert (found.results, found.unreadable, found.badge) == ((), ("torn.json",), False)
    assert read_results(None).folder is None
    assert read_results(tmp_path / "absent").results == ()
