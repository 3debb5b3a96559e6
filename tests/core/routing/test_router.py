"""The routing machine: events in, whole effect tuples out."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvrelay.core.model.effects import (
    BreakOff,
    CancelAttempt,
    Dispatch,
    PassThrough,
    Refuse,
    Report,
    RequestReplay,
    WakeAt,
    WriteReceipt,
)
from kvrelay.core.model.events import (
    AttemptAccepted,
    AttemptFailed,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    CanGoOn,
    CannotGoOn,
    ClientLeft,
    EventsSkipped,
    FirstTokenSeen,
    KvBatch,
    ProbeAnswered,
    ReplayArrived,
    ReplayUnavailable,
    RequestArrived,
    RequestFinished,
    ResidencyReset,
    SessionClosed,
    WokeUp,
    WorkerDrained,
    WorkerJoined,
    WorkerResumed,
    WorkerSpec,
)
from kvrelay.core.model.ids import SessionKey, WorkerId
from kvrelay.core.model.prompt import Prompt, Usage
from kvrelay.core.model.units import FallbackReason, Fault, IndexState, RouteReason, Status
from kvrelay.core.routing.router import Router
from kvrelay.core.routing.settings import RouterSettings
from tests.core.routing.rig import SIZE, Rig, chosen, text


@pytest.fixture
def rig():
    rig = Rig(policy="round_robin")
    rig.join("a", "b")
    return rig


# --- the life of a request ---------------------------------------------------------------------------------------


def test_a_request_from_arrival_to_receipt(rig):
    a = rig.live_id("a")
    assert rig.arrive(text(1)) == (Dispatch("r1", 1, a, None, 0, RouteReason.ROUND_ROBIN),)
    assert rig.step(AttemptAccepted("r1", 1, decision_us=42.0)) == ()
    assert rig.step(FirstTokenSeen("r1")) == ()
    (written,) = rig.step(RequestFinished("r1", 200, Usage(16, 8, 0), itl_ms=(1.0, 2.0)))
    receipt = written.receipt
    assert isinstance(written, WriteReceipt) and receipt.status is Status.OK
    assert (receipt.ttft_ms, receipt.e2e_ms, receipt.itl_ms, receipt.decision_us) == (2.0, 3.0, (1.0, 2.0), 42.0)
    assert (receipt.prompt_tokens, receipt.completion_tokens) == (16, 8)
    assert rig.load("a") == [0, 0, 0]


@pytest.mark.covers("S01")
@pytest.mark.parametrize("stage", ["before headers", "after headers", "in mid body"])
def test_a_client_that_leaves_gives_the_load_back_at_once(rig, stage):
    rig.arrive(text(1, 2, 3))
    assert rig.load("a") == [1, 3 * SIZE + 1, 0]
    if stage != "before headers":
        rig.accept()
    if stage == "in mid body":
        rig.step(FirstTokenSeen("r1"))
        assert rig.load("a") == [1, 0, 4]
    for _ in range(20):
        rig.step(ProbeAnswered(rig.live_id("a"), ok=True))
    cancel, written = rig.step(ClientLeft("r1"))
    assert cancel == CancelAttempt("r1", 1)
    assert written.receipt.status is Status.CLIENT_CANCELLED and written.receipt.failure_reason is None
    assert rig.load("a") == [0, 0, 0]
    assert next(w for w in rig.router.status(rig.now).workers if w.name == "a").up, "no fault of the worker"


@pytest.mark.covers("S27", "RC-11")
def test_a_worker_that_dies_before_its_first_byte_is_replaced_and_both_attempts_are_kept(rig):
    rig.arrive(text(1))
    rig.accept()
    effects = rig.fail(Fault.RESET)
    assert effects[0] == Dispatch("r1", 2, rig.live_id("b"), None, 0, RouteReason.ROUND_ROBIN)
    assert rig.load("a") == [0, 0, 0] and rig.load("b")[0] == 1
    rig.accept(attempt=2)
    receipt = rig.finish()
    assert [(t.attempt, t.worker, t.fault) for t in receipt.attempts] == [(1, "a", Fault.RESET), (2, "b", None)]
    assert receipt.fallback_reason is FallbackReason.RETRIED_ELSEWHERE and receipt.status is Status.OK


@pytest.mark.covers("S27", "RC-13", "RT-23")
def test_after_the_first_byte_a_lost_worker_breaks_the_stream_and_nobody_else_is_asked(rig):
    rig.arrive(text(1))
    rig.accept()
    rig.step(FirstTokenSeen("r1"))
    ending, written = rig.fail(Fault.RESET, relayed=True)
    assert ending == BreakOff("r1", Status.WORKER_LOST, "worker_lost")
    assert (written.receipt.status, written.receipt.failure_reason) == (Status.WORKER_LOST, "worker_lost")
    assert rig.load("a") == rig.load("b") == [0, 0, 0]


@pytest.mark.covers("S26", "DR-02")
def test_within_one_request_no_worker_is_tried_twice(rig):
    rig.join("c", "d")
    rig.arrive(text(1))
    tried = ["a"]
    for attempt in (1, 2):
        tried.append(chosen(rig.fail(Fault.SERVER_ERROR, attempt=attempt, http_status=500)))
    assert tried == ["a", "b", "c"]
    effects = rig.fail(Fault.SERVER_ERROR, attempt=3, http_status=500)
    assert effects[0] == PassThrough("r1")
    assert rig.receipts[-1].status is Status.ERROR and len(rig.receipts[-1].attempts) == 3
    assert rig.receipts[-1].not_retried_because == "attempts_used_up"


@pytest.mark.covers("S25")
def test_back_pressure_of_all_is_handed_to_the_client_as_the_worker_said_it(rig):
    rig.arrive(text(1))
    assert chosen(rig.fail(Fault.BACK_PRESSURE, http_status=429, retry_after_s=3.0)) == "b"
    effects = rig.fail(Fault.BACK_PRESSURE, attempt=2, http_status=503)
    assert effects[0] == PassThrough("r1")
    receipt = rig.receipts[-1]
    assert (receipt.status, receipt.failure_reason, receipt.http_status) == (Status.REFUSED, "back_pressure", 503)
    assert receipt.not_retried_because == "all_tried"
    assert all(w.up and w.routable for w in rig.router.status(rig.now).workers)


@pytest.mark.covers("S24")
def test_a_client_error_is_the_workers_own_word_and_says_nothing_about_its_health(rig):
    for _ in range(20):
        rig.arrive(text(1))
        rig.accept()
        receipt = rig.finish(http_status=400)
        assert (receipt.status, receipt.http_status, len(receipt.attempts)) == (Status.CLIENT_ERROR, 400, 1)
    assert all(w.up and w.routable for w in rig.router.status(rig.now).workers)
    assert rig.serve(text(1)).status is Status.OK


@pytest.mark.parametrize("fault", [Fault.IDLE_TIMEOUT, Fault.TOTAL_TIMEOUT])
def test_used_up_time_is_a_timeout_and_not_retried(rig, fault):
    rig.arrive(text(1))
    refusal = rig.fail(fault)[0]
    assert (refusal.http_status, refusal.reason) == (504, fault.value)
    assert rig.receipts[-1].status is Status.TIMEOUT


def test_when_all_connections_fail_the_client_gets_a_refusal(rig):
    rig.arrive(text(1))
    rig.fail(Fault.CONNECT)
    effects = rig.fail(Fault.CONNECT, attempt=2)
    refusal = next(effect for effect in effects if isinstance(effect, Refuse))
    assert (refusal.http_status, refusal.reason) == (502, "worker_lost")
    assert rig.receipts[-1].failure_reason == "worker_lost"


def test_without_any_worker_the_request_is_refused_and_has_its_receipt():
    rig = Rig()
    refusal, written = rig.arrive(text(1))
    assert refusal == Refuse("r1", 503, "no_worker_known", 1.0)
    receipt = written.receipt
    assert (receipt.status, receipt.route_reason, receipt.chosen_worker) == (
        Status.REFUSED,
        RouteReason.NOT_ROUTED,
        None,
    )


def test_late_events_of_an_ended_request_change_nothing(rig):
    rig.serve(text(1))
    for event in (
        AttemptAccepted("r1", 1),
        FirstTokenSeen("r1"),
        AttemptFailed("r1", 1, Fault.RESET),
        RequestFinished("r1", 200),
        ClientLeft("r1"),
    ):
        assert rig.step(event) == ()
    assert len(rig.receipts) == 1 and rig.router.late_events == 5


def test_a_failure_of_an_older_attempt_does_not_end_the_newer_one(rig):
    rig.arrive(text(1))
    rig.fail(Fault.RESET)
    assert rig.fail(Fault.RESET, attempt=1) == ()
    assert rig.load("b")[0] == 1


# --- filters -----------------------------------------------------------------------------------------------------


@pytest.mark.covers("RT-09")
def test_an_unhealthy_worker_with_full_overlap_is_no_candidate():
    rig = Rig(health_failures=1)
    rig.join("a", "b")
    rig.hold("a", text(1, 2, 3))
    assert rig.serve(text(1, 2, 3)).chosen_worker == "a"
    rig.step(ProbeAnswered(rig.live_id("a"), ok=False))
    for _ in range(10):
        receipt = rig.serve(text(1, 2, 3))
        assert [c.worker for c in receipt.candidates] == ["b"] and receipt.candidates_total == 1


def test_filters_name_the_reason_when_nobody_is_left():
    rig = Rig(policy="round_robin", health_failures=1)
    rig.join("a", max_active_requests=1)
    rig.arrive(text(1))
    assert rig.arrive(text(1))[0].reason == "at_capacity"
    rig.finish("r1")
    rig.step(WorkerDrained("a"))
    assert rig.arrive(text(1))[0].reason == "all_draining"
    rig.step(WorkerResumed("a"))
    assert rig.ask(text(1)) == "a"
    rig.step(ProbeAnswered(rig.live_id("a"), ok=False))
    assert rig.arrive(text(1))[0].reason == "no_worker_alive"


def test_a_model_goes_to_workers_that_serve_it_and_an_unknown_one_to_any():
    rig = Rig(policy="round_robin")
    rig.join("a", models=("m1",))
    rig.join("b", models=("m2",), adapters=("x",))
    assert [rig.ask(model="m1"), rig.ask(model="m1"), rig.ask(model="m2"), rig.ask(model="x")] == ["a", "a", "b", "b"]
    assert {rig.ask(model="nobody has it") for _ in range(2)} == {"a", "b"}
    assert rig.router.adapter_of("x") == "x" and rig.router.adapter_of("m2") is None


def test_prefill_workers_get_no_whole_requests():
    rig = Rig(policy="round_robin")
    rig.join("p", role="prefill")
    assert rig.arrive(text(1))[0].reason == "no_worker_for_role"
    rig.join("d", role="decode")
    assert rig.ask(text(1)) == "d"


# --- residency ---------------------------------------------------------------------------------------------------


@pytest.mark.covers("RT-22", "DR-03")
def test_a_worker_that_comes_back_is_a_new_incarnation_and_starts_empty():
    rig = Rig()
    rig.join("a", "b")
    rig.hold("a", text(1, 2, 3))
    old = rig.live_id("a")
    rig.join("a", incarnation="2")
    receipt = rig.serve(text(1, 2, 3))
    assert receipt.matched_tokens_at_route == 0
    assert all(sum(c.matched_tokens.values()) == 0 for c in receipt.candidates)
    rig.publish("a", EventsSkipped("late"), worker=old)
    assert rig.step(KvBatch(old, 0, 9, (BlocksCleared(),))) == (Report("event_late", "a", "of 1"),)
    rig.hold("a", text(1, 2, 3))
    receipt = rig.serve(text(1, 2, 3))
    assert (receipt.chosen_worker, receipt.incarnation, receipt.matched_blocks_at_route) == ("a", "2", 3)


def test_registering_the_same_incarnation_again_changes_nothing():
    rig = Rig()
    rig.join("a")
    rig.hold("a", text(1))
    assert rig.step(WorkerJoined(rig.live_id("a"), WorkerSpec(url="u", block_size_tokens=SIZE))) == ()
    assert rig.serve(text(1)).matched_blocks_at_route == 1


@pytest.mark.covers("S09")
@pytest.mark.parametrize("how", ["the worker says so", "an operator resets it"])
def test_after_a_clear_a_worker_matches_nothing(how):
    rig = Rig()
    rig.join("a", "b")
    rig.hold("a", text(1, 2))
    rig.hold("b", text(1))
    if how == "the worker says so":
        rig.publish("a", BlocksCleared())
    else:
        rig.step(ResidencyReset("a"))
    receipt = rig.serve(text(1, 2))
    matched = {c.worker: c.matched_tokens["gpu"] // SIZE for c in receipt.candidates}
    assert matched == {"a": 0, "b": 1}


@pytest.mark.covers("S15")
def test_what_arrives_for_a_removed_worker_is_counted_and_changes_nothing():
    rig = Rig(policy="sticky")
    rig.join("a")
    gone = rig.live_id("a")
    rig.hold("a", text(1))
    rig.arrive(text(1), session_id="s")
    rig.accept()
    rig.leave("a")
    assert rig.router.sessions() == {} and rig.router.status(rig.now).workers == ()
    rig.step(KvBatch(gone, 0, 5, (BlocksCleared(),)))
    receipt = rig.finish(cached=0)
    assert receipt.status is Status.OK and receipt.incarnation == "1"
    rig.join("a", incarnation="2")
    assert rig.serve(text(1)).matched_tokens_at_route == 0 and rig.load("a") == [0, 0, 0]


@pytest.mark.covers("S11")
def test_ranks_of_one_worker_are_told_apart():
    rig = Rig()
    rig.join("a", ranks=2)
    rig.hold("a", text(1, 2), rank=1)
    dispatch = rig.arrive(text(1, 2))[0]
    assert (dispatch.rank, dispatch.matched_tokens) == (1, 2 * SIZE)
    rig.publish("a", BlocksCleared(), rank=0)
    assert rig.arrive(text(1, 2))[0].rank == 1


@pytest.mark.covers("RT-28")
def test_workers_with_different_block_sizes_are_compared_in_tokens():
    rig = Rig()
    prompt = text(1, blocks=64)
    for name, size, held_tokens in (("a", 16, 512), ("b", 32, 768), ("c", 64, 640)):
        rig.join(name, block_size_tokens=size)
        rig.hold(name, prompt[:held_tokens], size=size)
    assert rig.router.block_sizes() == (16, 32, 64)
    receipt = rig.serve(prompt)
    assert {c.worker: c.matched_tokens["gpu"] for c in receipt.candidates} == {"a": 512, "b": 768, "c": 640}
    assert receipt.chosen_worker == "b", "24 blocks of 32 beat 32 blocks of 16"
    assert (receipt.block_size, receipt.matched_blocks_at_route, receipt.eligible_prefix_blocks) == (32, 24, 32)


@pytest.mark.covers("S13")
def test_a_wrong_block_size_at_registration_is_visible_and_the_events_are_right():
    rig = Rig()
    rig.join("a", block_size_tokens=16)
    rig.join("b", block_size_tokens=None)
    prompt = text(1, blocks=8)
    rig.hold("a", prompt, size=32)
    rig.hold("b", prompt[:64], size=32)
    reports = [effect for effect in rig.effects if isinstance(effect, Report) and "block_size" in effect.kind]
    assert reports == [
        Report("block_size_mismatch", "a", "registered with 16 tokens, events carry 32; using 32"),
    ]
    receipt = rig.serve(prompt)
    assert (receipt.chosen_worker, receipt.block_size, receipt.matched_blocks_at_route) == ("a", 32, 4)


@pytest.mark.covers("DR-05", "DR-06")
def test_a_gap_is_replayed_and_the_index_equals_the_truth():
    rig = Rig()
    rig.join("a")
    a = rig.live_id("a")
    events = [stored_event(rig, n) for n in range(3)]
    rig.step(KvBatch(a, 0, 0, (events[0],)))
    effects = rig.step(KvBatch(a, 0, 2, (events[2],)))
    assert effects[:2] == (Report("event_gap", "a", "rank 0: replay from 1"), RequestReplay(a, 0, 1))
    assert rig.serve(text(2)).matched_blocks_at_route == 0, "held back until the order is clear"
    rig.step(ReplayArrived(a, 0, (KvBatch(a, 0, 1, (events[1],)), KvBatch(a, 0, 2, (events[2],)))))
    assert [rig.serve(text(n)).matched_blocks_at_route for n in range(3)] == [1, 1, 1]
    assert rig.serve(text(0)).index_state is IndexState.LIVE


@pytest.mark.covers("S17")
def test_a_long_history_is_applied_in_steps_and_in_order_with_what_comes_meanwhile():
    rig = Rig()
    rig.step(WorkerJoined(WorkerId("a", "1"), WorkerSpec(url="u", block_size_tokens=SIZE)))
    a = rig.live_id("a")
    history = [KvBatch(a, 0, n, (stored_event(rig, n, blocks=50),)) for n in range(100)]
    rig.step(ReplayArrived(a, 0, tuple(history)))
    rig.step(KvBatch(a, 0, 100, (BlocksRemoved(rig.hashes(text(99, blocks=50))),)))
    known = [target_of(rig).index_blocks["gpu"]]
    assert target_of(rig).index_state is IndexState.INCOMPLETE
    while target_of(rig).index_state is IndexState.INCOMPLETE:
        rig.step(WokeUp())
        known.append(target_of(rig).index_blocks["gpu"])
    assert known == sorted(known[:-1]) + known[-1:] and max(np.diff(known)) <= 2_050 and known[-1] == 99 * 50
    assert target_of(rig).index_state is IndexState.LIVE


def target_of(rig):
    return rig.router.status(rig.now).workers[0].targets[0]


def test_a_drained_worker_stays_drained_when_its_process_is_replaced():
    rig = Rig(policy="round_robin")
    rig.join("a", "b")
    rig.step(WorkerDrained("a"))
    rig.join("a", incarnation="2")
    assert {rig.serve(text(1)).chosen_worker for _ in range(3)} == {"b"}
    rig.step(WorkerResumed("a"))
    assert {rig.serve(text(1)).chosen_worker for _ in range(3)} == {"a", "b"}


@pytest.mark.covers("DR-08")
@pytest.mark.parametrize("how", ["the worker says it has none", "it does not answer in time"])
def test_a_gap_without_replay_drops_what_was_believed(how):
    rig = Rig(replay_timeout_s=5.0)
    rig.join("a")
    a = rig.live_id("a")
    rig.step(KvBatch(a, 0, 0, (stored_event(rig, 0),)))
    rig.step(KvBatch(a, 0, 2, (stored_event(rig, 2),)))
    if how == "the worker says it has none":
        rig.step(ReplayUnavailable(a, 0))
    else:
        rig.now += 5.1
        rig.step(WokeUp())
    assert Report("event_gap_lost", "a", "rank 0: from 1") in rig.effects
    assert [rig.serve(text(n)).matched_blocks_at_route for n in (0, 2)] == [0, 1]
    assert rig.serve(text(0)).index_state is IndexState.INCOMPLETE


def stored_event(rig, n, blocks=1):
    tokens = text(n, blocks=blocks)
    return BlocksStored(rig.hashes(tokens), None, tokens, SIZE)


def drifting_rig(**settings):
    """A worker `a` that holds a prompt of eight blocks, and whose prompt 2 was stored in a batch that got lost."""
    rig = Rig(**settings)
    rig.join("a")
    rig.hold("a", text(1, blocks=8))
    return rig, rig.live_id("a"), BlocksStored(rig.hashes(text(2, blocks=8)), None, text(2, blocks=8), SIZE)


def serve_for_a_while(rig, tokens, *, cached, requests=4):
    receipts = []
    for _ in range(requests):
        receipts.append(rig.serve(tokens, cached=cached))
        rig.now += 1.0
    return receipts


def drift_reports(rig):
    return [effect.detail for effect in rig.effects if isinstance(effect, Report) and effect.kind == "tail_drift"]


@pytest.mark.covers("DR-07")
def test_the_loss_of_the_last_event_is_found_by_what_is_hit_and_repaired_by_a_replay_of_the_tail():
    rig, a, lost = drifting_rig()
    started = rig.now
    serve_for_a_while(rig, text(2, blocks=8), cached=8 * SIZE)
    assert drift_reports(rig) == ["rank 0: under_claim of 384 tokens in 3 requests; tail asked for"]
    assert rig.effects.count(RequestReplay(a, 0, 1)) == 1 and rig.now - started < 10
    assert target_of(rig).index_state is IndexState.INCOMPLETE
    assert rig.serve(text(1, blocks=8), cached=8 * SIZE).index_state is IndexState.INCOMPLETE, "and receipts say so"
    rig.step(ReplayArrived(a, 0, (KvBatch(a, 0, 1, (lost,)),)))
    receipt = rig.serve(text(2, blocks=8), cached=8 * SIZE)
    assert receipt.matched_tokens_at_route == 8 * SIZE
    assert target_of(rig).index_blocks["gpu"] == 16, "nothing that was known had to be forgotten"
    serve_for_a_while(rig, text(2, blocks=8), cached=8 * SIZE, requests=33)
    assert target_of(rig).index_state is IndexState.LIVE, "trusted again after a calm window"
    drift = target_of(rig).drift
    assert (drift.over_claim, drift.under_claim, drift.resyncs) == (0, 3, 1)
    counts = rig.router.status(rig.now).workers[0].events
    assert counts["gaps"] == 0, "no gap was seen, and none is claimed"


@pytest.mark.covers("DR-07", "RC-12")
@pytest.mark.parametrize("answer", ["nothing new", "no replay", "silence"])
def test_claims_that_go_on_failing_drop_the_residency_and_rebuild_it(answer):
    rig, a, _ = drifting_rig()

    def answer_the_tail():
        if answer == "nothing new":
            rig.step(ReplayArrived(a, 0, ()))
        elif answer == "no replay":
            rig.step(ReplayUnavailable(a, 0))
        else:
            rig.now += rig.router.settings.replay_timeout_s + 0.1
            rig.step(WokeUp())

    serve_for_a_while(rig, text(1, blocks=8), cached=0)
    answer_the_tail()
    assert target_of(rig).index_blocks["gpu"] == 8, "kept so far"
    serve_for_a_while(rig, text(1, blocks=8), cached=0, requests=10)
    first, second = drift_reports(rig)
    assert first == "rank 0: over_claim of 384 tokens in 3 requests; tail asked for"
    assert second.startswith("rank 0: over_claim") and second.endswith("residency dropped and history asked for")
    assert rig.effects.count(RequestReplay(a, 0, 0)) == 2, "when it joined, and now"
    assert target_of(rig).index_blocks["gpu"] == 0 and target_of(rig).index_state is IndexState.INCOMPLETE
    rig.step(ReplayArrived(a, 0, (KvBatch(a, 0, 0, (stored_event(rig, 5),)),)))
    assert target_of(rig).index_state is IndexState.LIVE
    assert rig.serve(text(5), cached=SIZE).matched_tokens_at_route == SIZE


@pytest.mark.covers("DR-07")
def test_an_index_that_is_known_to_be_incomplete_may_claim_too_little():
    rig, a, _ = drifting_rig()
    rig.step(KvBatch(a, 0, 5, ()))
    rig.step(ReplayUnavailable(a, 0))
    assert target_of(rig).index_state is IndexState.INCOMPLETE
    serve_for_a_while(rig, text(2, blocks=8), cached=8 * SIZE, requests=10)
    assert drift_reports(rig) == []


@pytest.mark.covers("S22")
def test_hits_of_several_prompts_in_one_request_are_no_drift():
    rig, _, _ = drifting_rig()
    for _ in range(6):
        keys = {SIZE: rig.router.keyer.prompt_keys(text(1, blocks=8), SIZE)}
        rig.step(RequestArrived("batch", Prompt(4 * 8 * SIZE, keys)))
        rig.accept("batch")
        rig.finish("batch", cached=4 * 7 * SIZE)
        rig.now += 1.0
    assert drift_reports(rig) == [] and target_of(rig).drift.compared == 0


def test_evictions_under_load_are_no_drift():
    rig, _, _ = drifting_rig()
    for _ in range(10):
        rig.hold("a", text(3, blocks=8))
        rig.arrive(text(3, blocks=8))
        rig.evict("a", text(3, blocks=8))
        rig.accept()
        rig.finish(cached=0)
        rig.now += 1.0
    assert drift_reports(rig) == [] and target_of(rig).drift.compared == 9


@pytest.mark.covers("RT-22", "DR-03")
def test_a_new_incarnation_starts_without_the_old_ones_drift():
    rig, _, _ = drifting_rig()
    serve_for_a_while(rig, text(1, blocks=8), cached=0, requests=3)
    rig.join("a", incarnation="2")
    assert target_of(rig).drift.compared == 0
    serve_for_a_while(rig, text(9), cached=0, requests=5)
    assert drift_reports(rig) == []


def test_guesses_that_nobody_uses_decay_with_time():
    rig = Rig(approximate_ttl_s=60.0)
    rig.join("a", sends_events=False)
    rig.serve(text(1, blocks=3), cached=0)
    assert rig.serve(text(1, blocks=3), cached=3 * SIZE).matched_tokens_at_route == 3 * SIZE
    used_at = rig.now
    while target_of(rig).index_blocks["gpu"]:  # time goes on from one wake-up that was asked for to the next
        rig.now = min(effect.at for effect in rig.effects if isinstance(effect, WakeAt) and effect.at > rig.now)
        rig.step(WokeUp())
    assert 60.0 <= rig.now - used_at < 70.0
    assert rig.serve(text(1, blocks=3), cached=0).matched_tokens_at_route == 0


@pytest.mark.covers("S10")
def test_a_batch_delivered_twice_counts_once():
    rig = Rig()
    rig.join("a")
    rig.hold("a", text(1))
    batch = KvBatch(rig.live_id("a"), 0, 0, (stored_event(rig, 1),))
    assert rig.step(batch) == (Report("event_duplicate", "a"),)
    rig.evict("a", text(1))
    assert rig.serve(text(1)).matched_tokens_at_route == 0


def test_a_worker_without_events_is_believed_to_keep_what_went_through_it():
    rig = Rig()
    rig.join("a", "b", sends_events=False)
    first = rig.serve(text(1, 2, 3), cached=0)
    again = rig.serve(text(1, 2, 3), cached=3 * SIZE)
    assert again.chosen_worker == first.chosen_worker and again.matched_blocks_at_route == 3
    assert again.index_state is IndexState.APPROXIMATE
    rig.serve(text(1, 2, 3), cached=SIZE)
    assert rig.serve(text(1, 2, 3)).matched_blocks_at_route == 3, "it was computed again, so it is there again"


def test_a_fleet_in_which_nothing_can_match_says_so():
    rig = Rig()
    rig.join("a", "b", sends_events=False, block_size_tokens=None)
    receipt = rig.serve(text(1))
    assert receipt.route_reason is RouteReason.CACHE_INDEX_UNUSABLE
    assert receipt.index_state is IndexState.UNUSABLE and receipt.matched_tokens_at_route is None
    assert rig.router.status(rig.now).workers[0].targets[0].index_problem == "no events and no known block size"


@pytest.mark.covers("RC-04", "RC-06")
@pytest.mark.parametrize(("tokens", "claimed_blocks"), [(3 * SIZE, 2), (3 * SIZE + 1, 3), (SIZE, 0)])
def test_a_claim_leaves_out_the_block_that_an_engine_always_computes_again(tokens, claimed_blocks):
    rig = Rig()
    rig.join("a")
    held = text(1, blocks=4)
    rig.hold("a", held)
    keys = rig.router.keyer.prompt_keys(held[:tokens], SIZE)
    rig.step(RequestArrived("r", Prompt(tokens, {SIZE: keys})))
    receipt = rig.finish("r", cached=claimed_blocks * SIZE)
    assert (receipt.eligible_prefix_blocks, receipt.matched_blocks_at_route) == (tokens // SIZE, claimed_blocks)
    losses = receipt.gate_loss_tokens
    assert losses.total == losses.prefix == (tokens // SIZE - claimed_blocks) * SIZE


def test_an_unscored_prompt_goes_by_load_with_its_reason():
    rig = Rig()
    rig.join("a", "b")
    receipt = rig.serve(unscored="image content")
    assert (receipt.route_reason, receipt.unscored_because) == (RouteReason.CACHE_NOT_SCORED, "image content")
    assert receipt.fallback_reason is FallbackReason.NOT_SCORED and receipt.matched_tokens_at_route is None


def test_a_speculative_entry_ends_with_its_request_or_its_deadline():
    rig = Rig(speculative_deadline_s=60.0)
    rig.join("a", "b")
    rig.arrive(text(1, 2))
    assert rig.router.status(rig.now).in_flight_prompts == 1
    rig.now += 61.0
    rig.step(WokeUp())
    assert rig.router.status(rig.now).in_flight_prompts == 0 and rig.load("a")[0] + rig.load("b")[0] == 1
    rig.finish()
    rig.arrive(text(1, 2))
    rig.finish()
    assert rig.router.status(rig.now).in_flight_prompts == 0


def test_wake_ups_are_asked_for_once_and_again_when_they_came():
    rig = Rig()
    rig.join("a")
    asked = [effect.at for effect in rig.effects if isinstance(effect, WakeAt)]
    assert asked == [rig.now - 0.001 + rig.router.settings.replay_timeout_s], "for the replay that might not answer"
    rig.arrive(text(1))
    rig.now = asked[0]
    (again,) = rig.step(WokeUp())
    assert again == WakeAt(pytest.approx(60.0, abs=0.1)), "for the speculative entry"


def test_a_dropped_worker_is_swept_by_wake_ups():
    rig = Rig()
    rig.join("a")
    rig.hold("a", text(1, blocks=5_000))
    rig.leave("a")
    wakes = 0
    while rig.router.status(rig.now).index_blocks:
        assert any(isinstance(effect, WakeAt) for effect in rig.effects[-3:])
        rig.step(WokeUp())
        wakes += 1
    assert wakes >= 3


# --- questions ---------------------------------------------------------------------------------------------------


def test_a_what_if_question_dispatches_nothing_and_takes_no_turn(rig):
    arrived = RequestArrived("q", Prompt(16, {SIZE: rig.router.keyer.prompt_keys(text(1), SIZE)}))
    answers = [rig.router.match(rig.now, arrived) for _ in range(3)]
    assert {a.chosen for a in answers} == {"a"} and [c.worker for c in answers[0].candidates] == ["a", "b"]
    assert rig.ask(text(1)) == "a" and rig.load("b") == [0, 0, 0]
    assert Rig().router.match(0.0, arrived).reason == "no_worker_known"


# --- everything at once ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["cache_load", "sticky"])
def test_the_same_events_give_the_same_effects(policy):
    def run():
        rig = Rig(policy=policy)
        rig.join("a", "b", "c")
        rng = np.random.default_rng(11)
        for i in range(60):
            rig.arrive(text(*rng.integers(0, 4, 3)), draw=int(rng.integers(2**63)), session_id=f"s{i % 7}")
            if i % 5 == 0:
                rig.fail(Fault.RESET)
            elif i % 3:
                rig.finish(cached=0)
        return rig.effects

    assert run() == run()


class ChaoticFleet(RuleBasedStateMachine):
    """Any order of events whatsoever: one receipt per request, load back to zero, never a dead candidate, no worker
    twice, and nothing sent anew whose answer had begun unless it is continued."""

    def __init__(self):
        super().__init__()
        self.rig = Rig(policy="sticky", health_failures=1, affinity_ttl_s=5.0)
        self.lives: Counter = Counter()
        self.open: dict[str, int] = {}
        self.begun: set[str] = set()  # a part of the answer is with the client

    policies = st.sampled_from(["cache_load", "sticky", "sticky_load", "round_robin", "least_load"])

    @initialize(policy=policies, migrate=st.booleans())
    def start(self, policy, migrate):
        self.migrate = migrate
        self.rig = Rig(
            policy=policy, health_failures=1, affinity_ttl_s=5.0, speculative_deadline_s=3.0, migrate=migrate
        )

    names = st.sampled_from("abc")

    @rule(name=names)
    def join(self, name):
        self.lives[name] += 1
        self.rig.join(name, incarnation=str(self.lives[name]))

    @rule(name=names)
    def leave(self, name):
        self.rig.leave(name)

    @rule(name=names, ok=st.booleans())
    def probe(self, name, ok):
        self.rig.step(ProbeAnswered(WorkerId(name, str(self.lives[name])), ok))

    @rule(name=names, parts=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def publish(self, name, parts):
        if any(w.name == name for w in self.rig.router.status(self.rig.now).workers):
            self.rig.hold(name, text(*parts))

    @rule(parts=st.lists(st.integers(0, 2), min_size=1, max_size=3), session=st.sampled_from([None, "s", "t"]))
    def arrive(self, parts, session):
        effects = self.rig.arrive(text(*parts), session_id=session, draw=len(self.open))
        self.follow(effects, self.rig.last, 1)

    def follow(self, effects, request, attempt):
        if (worker := chosen(effects)) is not None:
            status = {w.name: w for w in self.rig.router.status(self.rig.now).workers}[worker]
            assert status.standing != "dead" and not status.draining
            dispatch = next(effect for effect in effects if isinstance(effect, Dispatch))
            assert dispatch.continues == (request in self.begun) and (self.migrate or not dispatch.continues)
            self.open[request] = attempt
        else:
            self.open.pop(request, None)

    rests = st.sampled_from([None, CannotGoOn("logprobs"), CanGoOn(0), CanGoOn(7)])

    @rule(data=st.data(), fault=st.sampled_from(list(Fault)), relayed=st.booleans(), rest=rests)
    def fail(self, data, fault, relayed, rest):
        if self.open:
            request = data.draw(st.sampled_from(sorted(self.open)))
            attempt = self.open[request]
            if relayed:
                self.begun.add(request)
            more = {"relayed": request in self.begun, "rest": rest, "http_status": 503}
            self.follow(self.rig.fail(fault, request, attempt, **more), request, attempt + 1)
            endings = [effect for effect in self.rig.effects[-4:] if isinstance(effect, PassThrough | Refuse)]
            assert request not in self.begun or all(effect.request_id != request for effect in endings)

    @rule(data=st.data(), how=st.sampled_from(["accept", "token", "finish", "leave"]))
    def progress(self, data, how):
        if not self.open:
            return
        request = data.draw(st.sampled_from(sorted(self.open)))
        match how:
            case "accept":
                self.rig.accept(request, self.open[request])
            case "token":
                self.rig.step(FirstTokenSeen(request))
            case "finish":
                self.rig.finish(self.open.pop(request) and request, cached=0)
            case "leave":
                del self.open[request]
                self.rig.step(ClientLeft(request))

    @rule(session=st.sampled_from("st"))
    def close(self, session):
        self.rig.step(SessionClosed(session))
        assert SessionKey(session) not in self.rig.router.sessions()

    @rule(seconds=st.floats(0.1, 4.0))
    def wait(self, seconds):
        self.rig.now += seconds
        self.rig.step(WokeUp())

    @invariant()
    def one_receipt_each_and_no_load_without_requests(self):
        ids = [receipt.request_id for receipt in self.rig.receipts]
        assert len(ids) == len(set(ids))
        assert len(ids) + len(self.open) == self.rig._requests
        for receipt in self.rig.receipts:
            tried = [attempt.worker for attempt in receipt.attempts]
            assert len(tried) == len(set(tried)) <= self.rig.router.settings.retry_attempts
            assert receipt.migrations == sum(attempt.continued for attempt in receipt.attempts)
        if not self.open:
            assert not any(session.turns for session in self.rig.router._affinity._sessions.values())
            for worker in self.rig.router.status(self.rig.now).workers:
                assert self.rig.load(worker.name) == [0, 0, 0]


ChaoticFleet.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@pytest.mark.covers("RC-01", "RC-11", "S01")
class TestChaoticFleet(ChaoticFleet.TestCase):
    pass


def test_two_live_requests_of_one_id_are_a_hosts_mistake(rig):
    rig.arrive(text(1), request_id="x")
    with pytest.raises(AssertionError, match="x is live already"):
        rig.arrive(text(1), request_id="x")


def test_a_router_without_settings_routes():
    assert Router(RouterSettings()).status(0.0).policy == "cache_load"


# --- events that say nothing -------------------------------------------------------------------------------------


@pytest.mark.covers("S23")
def test_events_of_which_nothing_can_be_indexed_make_the_index_unusable_until_one_can_be():
    rig = Rig()
    rig.join("a")
    for _ in range(31):
        rig.publish("a", EventsSkipped("cache_kind_mamba"))
    assert target_of(rig).index_state is IndexState.LIVE
    effects = rig.publish("a", EventsSkipped("cache_kind_mamba"))
    problem = "none of its 32 events could be indexed: cache_kind_mamba"
    assert Report("index_unusable", "a", problem) in effects
    assert (target_of(rig).index_state, target_of(rig).index_problem) == (IndexState.UNUSABLE, problem)
    assert rig.serve(text(1)).index_state is IndexState.UNUSABLE
    rig.hold("a", text(1))
    assert target_of(rig).index_state is IndexState.LIVE and rig.serve(text(1)).matched_blocks_at_route == 1
    rig.publish("a", EventsSkipped("cache_kind_mamba", 100))
    assert target_of(rig).index_state is IndexState.LIVE, "a worker of several kinds of cache is usual"


@pytest.mark.covers("S13", "S23")
def test_a_block_size_beyond_what_can_be_keyed_is_said_and_harms_nobody():
    rig = Rig()
    rig.join("a", "b")
    tokens = np.arange(8192, dtype=np.uint32)
    for n in range(32):
        rig.publish("a", BlocksStored((n,), None, tokens, 8192))
    a, b = (worker.targets[0] for worker in rig.router.status(rig.now).workers)
    assert (a.index_state, b.index_state) == (IndexState.UNUSABLE, IndexState.LIVE)
    assert a.index_problem == "none of its 32 events could be indexed: block size 8192 is above 4096 tokens"
    rig.hold("b", text(1))
    assert rig.serve(text(1)).chosen_worker == "b"


@pytest.mark.covers("S13")
@pytest.mark.parametrize("events", [True, False])
def test_a_worker_registered_with_such_a_block_size_is_served_without_an_index(events):
    rig = Rig()
    rig.join("a", block_size_tokens=8192, sends_events=events)
    assert target_of(rig).index_problem == "block size 8192 is above 4096 tokens"
    assert rig.serve(text(1)).index_state is IndexState.UNUSABLE
