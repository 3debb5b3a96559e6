"""What one step computes, as tables: (waiting and running) -> parts of the next step."""

from __future__ import annotations

import numpy as np
import pytest

from kvrelay.core.engine.engine import Aborted, Admitted, Finished, PayloadsCorrupted, Preempted, StepStarted
from kvrelay.core.engine.scheduler import Plan
from tests.core.engine.engines import Drive, make_engine, request, tokens


def parts(drive: Drive) -> list[tuple[str, int]]:
    """(request, tokens) of the step under way."""
    plan = drive.engine._plan
    assert isinstance(plan, Plan)
    return [(sequence.request.request_id, count) for sequence, count in plan.parts]


@pytest.mark.parametrize(
    ("budget", "prompts", "steps"),
    [
        (100, {"a": 10}, [[("a", 10)], [("a", 1)]]),
        (4, {"a": 10}, [[("a", 4)], [("a", 4)], [("a", 2)], [("a", 1)]]),
        (16, {"a": 10, "b": 10}, [[("a", 10)], [("a", 1), ("b", 10)], [("a", 1), ("b", 1)]]),
        (8, {"a": 3, "b": 10}, [[("a", 3)], [("a", 1), ("b", 7)], [("a", 1), ("b", 3)], [("a", 1), ("b", 1)]]),
    ],
)
def test_running_first_then_waiting_within_the_budget(
    budget: int, prompts: dict[str, int], steps: list[list[tuple[str, int]]]
) -> None:
    drive = Drive(make_engine(token_budget=budget))
    for i, (name, prompt_tokens) in enumerate(prompts.items()):
        drive.submit(request(name, tokens(prompt_tokens, start=1000 * i), 9))
    seen = [parts(drive)]
    for _ in steps[1:]:
        drive.end_step()
        seen.append(parts(drive))
    assert seen == steps


def test_the_budget_is_shared_by_two_prefills_and_the_first_come_is_the_first_served() -> None:
    drive = Drive(make_engine(token_budget=12))
    drive.submit(request("busy", tokens(1, start=900)))
    drive.submit(request("a", tokens(8)), request("b", tokens(8, start=100)), request("c", tokens(8, start=200)))
    drive.end_step()
    assert parts(drive) == [("a", 8), ("b", 4)]
    drive.end_step()
    assert parts(drive) == [("b", 4), ("c", 8)]


def test_max_num_seqs_bounds_what_runs() -> None:
    drive = Drive(make_engine(max_num_seqs=2))
    drive.submit(*(request(name, tokens(4, start=100 * i), 3) for i, name in enumerate("abc")))
    drive.end_step()
    assert (drive.engine.running_requests, drive.engine.waiting_requests) == (2, 1)
    drive.run()
    assert [end.request_id for end in drive.all(Finished)] == ["a", "b", "c"]


def test_a_request_waits_until_its_whole_prompt_fits() -> None:
    drive = Drive(make_engine(blocks=4))
    drive.submit(request("a", tokens(8), 4), request("b", tokens(9, start=100), 1))
    drive.end_step()
    assert (drive.engine.running_requests, drive.engine.waiting_requests) == (1, 1)
    drive.run()
    queued = {entry.request_id: entry.queue_s for entry in drive.all(Admitted)}
    assert queued["a"] == 0.0 and queued["b"] > 0.0


@pytest.mark.parametrize(("holder_tokens", "running"), [(3, 2), (4, 1)])
def test_idle_cached_blocks_count_once_as_hits_and_not_also_as_free_ones(holder_tokens: int, running: int) -> None:
    """Four blocks: two are hit, so the third one that `b` needs must be beside the one or two that the holder has."""
    drive = Drive(make_engine(blocks=4))
    drive.complete(request("warm", tokens(8)))
    drive.submit(request("holder", tokens(holder_tokens, start=500), 4), request("b", tokens(9), 1))
    drive.end_step()
    assert drive.engine.running_requests == running


def test_the_youngest_is_preempted_and_computed_again() -> None:
    drive = Drive(make_engine(blocks=6, max_model_len=24))
    drive.submit(request("a", tokens(8), 12), request("b", tokens(8, start=100), 12))
    drive.run()
    assert {entry.request_id for entry in drive.all(Preempted)} == {"b"}
    ends = {end.request_id: end for end in drive.all(Finished)}
    assert ends["a"].preemptions == 0 and ends["b"].preemptions >= 1
    assert len(drive.output("b")) == 12
    alone = Drive(make_engine())
    alone.complete(request("b", tokens(8, start=100), 12))
    assert drive.output("b") == alone.output("b"), "preemption changes the time, never the text"
    assert [entry.request_id for entry in drive.all(Admitted)] == ["a", "b"], "a second start is no second admission"


def until_preempted(drive: Drive) -> None:
    while not drive.all(Preempted):
        drive.end_step()


def test_a_preempted_request_waits_before_those_that_never_started() -> None:
    drive = Drive(make_engine(blocks=6, max_model_len=24, max_num_seqs=2))
    late = request("late", tokens(8, start=300), 12)
    drive.submit(request("a", tokens(8), 12), request("b", tokens(8, start=100), 12), late)
    until_preempted(drive)
    assert [sequence.request.request_id for sequence in drive.engine._scheduler.waiting] == ["b", "late"]
    drive.run()


def test_what_was_read_wrong_before_a_preemption_is_forgotten_with_the_blocks() -> None:
    """`b` hits a wrong block, loses it to `a`, which overwrites it, and computes it anew: from there on it is right."""
    drive = Drive(make_engine(blocks=6, max_model_len=24))
    prompt = tokens(8, start=100)
    drive.complete(request("seed", prompt[:5]))
    drive.send(PayloadsCorrupted())
    drive.submit(request("a", tokens(9), 15), request("b", prompt, 8))
    until_preempted(drive)
    before = drive.output("b")
    drive.run()
    (end,) = [end for end in drive.all(Finished) if end.request_id == "b"]
    assert end.preemptions == 1 and end.wrong_reuse_blocks == 1 and 0 < len(before) < 8
    context = np.concatenate([prompt, np.frombuffer(before, dtype=np.uint8)]).astype(np.uint32)
    clean = Drive(make_engine())
    clean.complete(request("b", context, 8 - len(before)))
    assert drive.output("b") == before + clean.output("b")


def test_an_abort_while_waiting_frees_the_place() -> None:
    drive = Drive(make_engine(max_num_seqs=1))
    drive.submit(*(request(name, tokens(4, start=100 * i), 2) for i, name in enumerate("abc")))
    drive.send(Aborted("b"))
    drive.run()
    assert [(end.request_id, end.reason) for end in drive.all(Finished)] == [
        ("b", "abort"),
        ("a", "length"),
        ("c", "length"),
    ]


def test_a_step_with_prefill_and_decode_costs_both() -> None:
    drive = Drive(make_engine(token_budget=64))
    drive.submit(request("a", tokens(8), 5))
    drive.end_step()
    drive.submit(request("b", tokens(20, start=100), 5))
    began_s = drive.under_way
    assert began_s is not None
    drive.end_step()
    mixed = drive.all(StepStarted)[-1]
    assert (mixed.prefill_tokens, mixed.decode_requests) == (20, 1)
    assert mixed.ends_at_s - began_s.ends_at_s == pytest.approx(0.001 + 0.020 + 0.010)
