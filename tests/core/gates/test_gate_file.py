from __future__ import annotations

import pytest

from kvrelay.core.gates.gate_file import AllOf, Edges, GateError, Limit, PairedLimit, parse_gates

HEAD = """
title = "clever over simple"
candidate = "cache_load"
baseline = "round_robin"
baseline_run = "0123456789abcdef"
"""
WHOLE = (
    HEAD
    + """
[buckets]
prefix_tokens = [512, 4096]

[[gate]]
name = "slo"
metric = "ttft_p95_ms"
at_most = 600

[[gate]]
name = "pairs"
paired = "ttft_ms"
over = "every_bucket"
at_most_ratio = 1.0

[[gate]]
name = "three at once"
all = [
  { metric = "ttft_p95_ms", at_most_ratio = 0.9 },
  { metric = "hits_disagree_ratio", at_most = 0.01 },
  { metric = "kv_usage_peak_ratio", at_most = 0.95, arm = "sticky" },
]
"""
)


def test_a_whole_file() -> None:
    file = parse_gates(WHOLE.encode())

    assert [gate.name for gate in file.gates] == ["slo", "pairs", "three at once"]
    assert file.gates[0].condition == Limit("ttft_p95_ms", 600.0, at_most=True, ratio=False)
    assert file.gates[1].condition == PairedLimit("ttft_ms", 1.0, "every_bucket")
    assert isinstance(file.gates[2].condition, AllOf)
    assert file.gates[2].condition.parts[2] == Limit(
        "kv_usage_peak_ratio", 0.95, at_most=True, ratio=False, arm="sticky"
    )
    assert file.edges == Edges((512, 4096), ())
    assert file.digest != parse_gates(WHOLE.replace("600", "601").encode()).digest


def gate(body: str, *, head: str = HEAD) -> str:
    return f'{head}\n[[gate]]\nname = "g"\n{body}\n'


@pytest.mark.parametrize(
    ("text", "where", "found", "nearest"),
    [
        ("=", "the file", None, None),
        (HEAD, "the file", "no gate", None),
        (gate('metric = "ttft_p95"\nat_most = 1'), "gate `g`, `metric`", "`ttft_p95`", "ttft_p95_ms"),
        (gate('metric = "ttft_p95_ms"\nat_mots = 1'), "gate `g`", "unknown key `at_mots`", "at_most"),
        (gate('metric = "ttft_p95_ms"'), "gate `g`", "0 limits", None),
        (gate('metric = "ttft_p95_ms"\nat_most = 1\nat_least = 1'), "gate `g`", "2 limits", None),
        (gate('metric = "ttft_p95_ms"\nat_most = true'), "gate `g`, `at_most`", "`True`", None),
        (gate('metric = "ttft_p95_ms"\nat_most = -1'), "gate `g`, `at_most`", "`-1`", None),
        (gate('at_most = -1'), "gate `g`", "neither `metric` nor `paired`", None),
        (gate('paired = "ttft_ms"'), "gate `g`, `at_most_ratio`", "missing", None),
        (gate('paired = "ttft_ms"\nat_most_ratio = 1\nover = "each"'), "gate `g`, `over`", "`each`", None),
        (gate('all = [{ metric = "preemptions", at_most = 1 }]'), "gate `g`", "`all` of 1", None),
        (
            gate('metric = "preemptions"\nat_most = 1\nrelative_to = "sticky"'),
            "gate `g`",
            "`relative_to` with `at_most`",
            None,
        ),
        (gate('metric = "preemptions"\nat_most = 1', head=HEAD.replace("cache_load", "round_robin")), "`baseline`",
         "`round_robin`, which is the candidate", None),
        (gate('metric = "preemptions"\nat_most = 1') + "[buckets]\nin_flight = [4, 2]", "`buckets.in_flight`",
         "`[4, 2]`", None),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(text: str, where: str, found: str | None, nearest: str | None) -> None:
    with pytest.raises(GateError) as error:
        parse_gates(text.encode())

    assert error.value.where == where
    assert found is None or error.value.found == found
    assert error.value.nearest == nearest


@pytest.mark.covers("BM-32", "GT-07")
@pytest.mark.parametrize("cited", ['baseline_run = ""', 'baseline_run = "vendor says 30 %"', ""])
def test_a_file_without_an_own_baseline_run_is_refused(cited: str) -> None:
    with pytest.raises(GateError) as error:
        parse_gates(WHOLE.replace('baseline_run = "0123456789abcdef"', cited).encode())
    assert "`baseline_run`" in error.value.where


@pytest.mark.covers("BM-32", "GT-07")
def test_without_an_earlier_run_only_ratios_and_budgets_of_failures_are_possible() -> None:
    this_run = HEAD.replace("0123456789abcdef", "this-run")

    parse_gates(gate('metric = "ttft_p95_ms"\nat_most_ratio = 0.9', head=this_run).encode())
    parse_gates(gate('metric = "failed_requests"\nat_most = 0', head=this_run).encode())
    with pytest.raises(GateError, match="a number for `ttft_p95_ms` while `baseline_run` is `this-run`"):
        parse_gates(gate('metric = "ttft_p95_ms"\nat_most = 600', head=this_run).encode())
