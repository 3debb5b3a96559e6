"""What no combination of figures, gates and evidence may ever lead to."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.gates.test_judge import SIMPLE

from kvrelay.core.gates.evidence import Evidence, Hardware, Layer, Registration
from kvrelay.core.gates.gate_file import AllOf, Edges, Gate, GateFile, Limit
from kvrelay.core.gates.judge import Compared, Outcome, Value, judge
from kvrelay.core.gates.metrics import METRICS

values = st.none() | st.floats(0, 1e6) | st.just(math.inf)
limits = st.builds(
    Limit, metric=st.sampled_from(sorted(METRICS)), value=st.floats(0, 2), at_most=st.booleans(), ratio=st.booleans()
)
conditions = limits | st.builds(AllOf, st.lists(limits, min_size=2, max_size=3).map(tuple))
arms = st.fixed_dictionaries({name: values.map(lambda value: Value(value, 9)) for name in METRICS})
evidences = st.builds(
    Evidence,
    layer=st.sampled_from(Layer),
    hardware=st.sampled_from(Hardware),
    registration=st.sampled_from(Registration),
    repeats=st.integers(0, 4),
    answered_requests=st.integers(0, 40),
    contaminated_arms=st.lists(st.just("a-0"), max_size=1),
    unanswered_records=st.lists(st.just("one request left no sample"), max_size=1),
)


def gate_file(wanted: list[Gate]) -> GateFile:
    return GateFile("t", "clever", "simple", "this-run", tuple(wanted), Edges(), "digest")


@pytest.mark.covers("GT-01", "GT-08", "GT-10")
@given(st.lists(conditions, min_size=1, max_size=4), arms, arms, evidences)
@settings(max_examples=150, deadline=None)
def test_a_pass_means_everything_was_kept_known_and_proven(
    wanted: list[Limit | AllOf], clever: dict[str, Value], simple: dict[str, Value], evidence: Evidence
) -> None:
    gates = gate_file([Gate(f"gate {number}", condition) for number, condition in enumerate(wanted)])
    verdict = judge(gates, {"clever": clever, "simple": simple}, Compared(), evidence)
    outcomes = [gate.outcome for gate in verdict.gates]

    assert (verdict.verdict is Outcome.FAIL) == (Outcome.FAIL in outcomes)
    if verdict.verdict is Outcome.PASS:
        assert set(outcomes) == {Outcome.PASS} and not evidence.doubts() and evidence.registration.pre_registered
    if verdict.promotion == "promotable":
        assert verdict.verdict is Outcome.PASS
        assert (evidence.layer, evidence.hardware) == (Layer.FLEET, Hardware.GPU)
    assert len(verdict.final_judges) == 3 and verdict.reasons


@given(st.floats(1e-6, 1.0), arms)
@settings(max_examples=50, deadline=None)
def test_no_figure_makes_up_for_failures(failed_ratio: float, others: dict[str, Value]) -> None:
    clever = {**others, "failed_ratio": Value(failed_ratio, 9)}
    simple = {name: Value(value, 9) for name, value in {**SIMPLE, "failed_ratio": 0.0}.items()}
    sure = Evidence(
        layer=Layer.FLEET, hardware=Hardware.GPU, registration=Registration.REGISTERED, repeats=9, answered_requests=900
    )
    easy = Gate("easy", Limit("ttft_p95_ms", 1e9, at_most=True, ratio=False))

    assert judge(gate_file([easy]), {"clever": clever, "simple": simple}, Compared(), sure).verdict is Outcome.FAIL
