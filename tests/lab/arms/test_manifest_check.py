from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest
from tests.lab.made_up_run import made_up_measured

from kvrelay.lab.arms.manifest_check import MergeRefused, gaps, merged

WHOLE: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(made_up_measured().manifest))


def without(path: str) -> dict[str, Any]:
    """The manifest with one member taken out."""
    found = copy.deepcopy(WHOLE)
    *parents, last = path.split(".")
    at: Any = found
    for name in parents:
        at = at[int(name)] if name.isdigit() else at[name]
    del at[last]
    return found


@pytest.mark.covers("BM-01", "BM-28")
def test_a_run_states_everything_that_a_reader_needs() -> None:
    assert gaps(WHOLE) == ()


@pytest.mark.covers("BM-01", "BM-02", "BM-03", "BM-28")
@pytest.mark.parametrize(
    "path",
    [
        "stated.commit", "stated.index_version", "stated.events_version", "stated.trace.sha256", "stated.plan.seed",
        "stated.fleet.workers", "stated.fleet.kv_tiers", "stated.fleet.topology", "stated.fleet.model.revision",
        "stated.fleet.model.tokenizer_sha256", "stated.fleet.model.chat_template_sha256", "stated.fleet.hardware",
        "observed.0.processes.0.pid", "observed.0.processes.0.log", "observed.0.processes.0.urls",
        "observed.0.processes.1.pid", "observed.0.processes.1.incarnation", "observed.0.processes.1.gpu_uuids",
        "observed.0.processes.1.block_size_tokens", "observed.0.processes.1.log", "observed.0.processes.1.urls",
    ],
)  # fmt: skip
def test_each_of_them_is_missed(path: str) -> None:
    (gap,) = gaps(without(path))

    assert gap.problem == "missing" and gap.where.endswith(path.rpartition(".")[2])


@pytest.mark.covers("BM-03")
def test_a_block_size_that_is_not_the_engines_is_named() -> None:
    found = copy.deepcopy(WHOLE)
    found["observed"][0]["processes"][1]["router_block_size_tokens"] = 32

    (gap,) = gaps(found)
    assert gap.problem == "32, while the engine says 16"


@pytest.mark.covers("BM-02")
def test_a_branch_name_is_no_revision() -> None:
    found = copy.deepcopy(WHOLE)
    found["stated"]["fleet"]["model"]["revision"] = "main"

    (gap,) = gaps(found)
    assert gap.where == "stated.fleet.model.revision"
    assert gaps({**found, "observed": []})[-1].problem == "no arm was run"


@pytest.mark.covers("BM-29")
def test_runs_of_other_stacks_are_not_merged() -> None:
    other = copy.deepcopy(WHOLE)
    other["digest"] = "f" * 64
    assert len(merged(WHOLE, other)["observed"]) == 2 * len(WHOLE["observed"])

    other["stated"]["fleet"]["engines"] = ["vllm 0.33.0"]
    with pytest.raises(MergeRefused, match="different engine versions: mock mock and vllm 0\\.33\\.0"):
        merged(WHOLE, other)
    with pytest.raises(MergeRefused, match="both are the run"):
        merged(WHOLE, WHOLE)
    with pytest.raises(MergeRefused, match=r"the second manifest is not whole: stated\.commit"):
        merged(WHOLE, {**without("stated.commit"), "digest": "e" * 64})


@pytest.mark.covers("BM-16")
def test_a_cut_trace_is_called_what_it_is() -> None:
    assert WHOLE["stated"]["trace"]["requests_retained"] < WHOLE["stated"]["trace"]["requests_received"]
    assert WHOLE["stated"]["trace"]["label"].endswith("filtered synthetic subset")
