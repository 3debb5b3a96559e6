"""Receipts as the router writes them: claim and outcome side by side, nothing invented, nothing secret."""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np
import pytest

from kvrelay.core.model.events import RequestFinished
from kvrelay.core.model.prompt import Usage
from kvrelay.core.model.units import FallbackReason, Fault, RouteReason, Status
from kvrelay.core.receipts.receipt import MAX_CANDIDATES, Receipt
from tests.core.routing.rig import SIZE, TENANT_A, TENANT_B, Rig, text


@pytest.fixture
def rig():
    rig = Rig()
    rig.join("a", "b")
    return rig


def as_json(receipt: Receipt) -> dict:
    return msgspec.json.decode(msgspec.json.encode(receipt))


@pytest.mark.covers("RC-01", "RC-02", "RC-11")
def test_one_receipt_per_request_with_its_session_or_null(rig):
    for i in range(20):
        rig.serve(text(i % 3), request_id=f"q{i}", session_id=f"s{i % 4}" if i % 2 else None)
    assert [r.request_id for r in rig.receipts] == [f"q{i}" for i in range(20)]
    assert [r.session_id for r in rig.receipts] == [f"s{i % 4}" if i % 2 else None for i in range(20)]
    assert {r.status for r in rig.receipts} == {Status.OK}


@pytest.mark.covers("RC-03", "SG-17")
def test_the_prefix_fingerprint_is_keyed_per_tenant(rig):
    prompt = text(1, 2)
    a = rig.serve(prompt, tenant=TENANT_A).prefix_fingerprint
    again = rig.serve(prompt, tenant=TENANT_A).prefix_fingerprint
    b = rig.serve(prompt, tenant=TENANT_B).prefix_fingerprint
    rotated = rig.serve(prompt, tenant=msgspec.structs.replace(TENANT_A, fingerprint_key=b"new")).prefix_fingerprint
    assert a == again and len({a, b, rotated}) == 3
    assert hashlib.sha256(prompt.tobytes()).hexdigest()[:16] not in a
    assert rig.serve(unscored="image").prefix_fingerprint is None


@pytest.mark.covers("RC-04")
@pytest.mark.parametrize("extra", [0, 1, SIZE - 1])
def test_eligible_blocks_are_the_full_blocks_of_the_prompt(rig, extra):
    prompt = text(1, blocks=3)[: 3 * SIZE]
    receipt = rig.serve(np.concatenate([prompt, np.zeros(extra, dtype=np.uint32)]))
    assert (receipt.eligible_prefix_blocks, receipt.eligible_prefix_tokens) == (3, 3 * SIZE)


@pytest.mark.covers("RC-05")
def test_the_chosen_worker_carries_its_incarnation(rig):
    rig.join("a", incarnation="7")
    lives = {(w.name, w.incarnation) for w in rig.router.status(rig.now).workers}
    receipt = rig.serve(text(1))
    assert (receipt.chosen_worker, receipt.incarnation) in lives


@pytest.mark.covers("RC-06", "RC-09", "RC-12")
def test_the_claim_is_kept_as_it_was_and_the_outcome_stands_beside_it(rig):
    prompt = text(1, blocks=100)
    rig.hold("a", prompt[: 80 * SIZE])
    rig.arrive(prompt)
    rig.evict("a", prompt[: 80 * SIZE], keep_blocks=76)
    receipt = rig.finish(cached=76 * SIZE)
    assert (receipt.matched_blocks_at_route, receipt.matched_tokens_at_route) == (80, 80 * SIZE)
    assert (receipt.actual_local_hits, receipt.actual_cached_tokens) == (76, 76 * SIZE)
    assert receipt.gate_loss_tokens.residency == 4 * SIZE


@pytest.mark.covers("RC-07")
def test_the_queue_is_that_of_the_ledger_state_the_decision_saw(rig):
    for i in range(3):
        rig.arrive(text(1, blocks=2), request_id=f"q{i}")
    receipts = [rig.finish(f"q{i}") for i in range(3)]
    assert [r.worker_queue_at_route for r in receipts] == [0, 1, 2]
    snapshots = [r.load_snapshot for r in receipts]
    assert snapshots == sorted(snapshots) and len(set(snapshots)) == 3
    assert receipts[2].candidates[0].load["queued_requests"] == 2


@pytest.mark.covers("RC-08")
def test_reasons_come_from_a_closed_vocabulary():
    schema = msgspec.json.schema(Receipt)
    assert set(schema["$defs"]["RouteReason"]["enum"]) == {reason.value for reason in RouteReason}
    with pytest.raises(msgspec.ValidationError, match="Invalid enum value"):
        msgspec.convert("because", RouteReason)


@pytest.mark.covers("RC-10")
def test_remote_bytes_are_the_workers_figure_or_null(rig):

    rig.arrive(text(1))
    rig.step(RequestFinished("r1", 200, Usage(16, 1, 0, remote_bytes_read=4_096, remote_path_ms={"fetch": 1.5})))
    rig.serve(text(1))
    assert [r.remote_bytes_read for r in rig.receipts] == [4_096, None]
    assert [r.remote_path_ms for r in rig.receipts] == [{"fetch": 1.5}, {}]


@pytest.mark.covers("RC-13")
def test_a_lost_worker_is_called_so(rig):
    rig.arrive(text(1))
    rig.fail(Fault.RESET)
    rig.fail(Fault.RESET, attempt=2)
    receipt = rig.receipts[-1]
    assert (receipt.status, receipt.failure_reason) == (Status.WORKER_LOST, "worker_lost")


@pytest.mark.covers("RC-14")
def test_every_fallback_has_a_reason_and_nothing_else_has_one(rig):
    assert rig.serve(text(1)).fallback_reason is None
    assert rig.serve(unscored="image").fallback_reason is FallbackReason.NOT_SCORED
    rig.arrive(text(1))
    rig.fail(Fault.RESET)
    assert rig.finish().fallback_reason is FallbackReason.RETRIED_ELSEWHERE


@pytest.mark.covers("RC-15")
def test_a_candidates_terms_can_be_added_up_by_hand(rig):
    rig.hold("a", text(1, blocks=9))
    receipt = rig.serve(text(1, blocks=12))
    for candidate in receipt.candidates:
        assert sum(candidate.terms.values()) == pytest.approx(candidate.score)
        assert set(candidate.terms) == {
            "queue_ms",
            "compute_ms",
            "displaced_ms",
            "growth_ms",
            "transfer_ms",
            "decode_ms",
        }


@pytest.mark.covers("RC-16")
def test_the_manifest_is_named_in_every_receipt(rig):
    assert rig.serve(text(1)).manifest_digest == "m1"


@pytest.mark.covers("RC-17")
def test_nothing_of_the_prompt_or_of_keys_is_in_a_receipt(rig):
    prompt = text(7, blocks=4)
    line = msgspec.json.encode(rig.serve(prompt, tenant=TENANT_A, model="m"))
    keys = rig.router.keyer.prompt_keys(prompt, SIZE).tolist()
    for canary in [*map(str, prompt[:3].tolist()), *map(str, keys), TENANT_A.fingerprint_key.decode()]:
        assert canary.encode() not in line


def test_the_chosen_and_at_most_eight_others_are_listed_best_first():
    rig = Rig()
    names = [f"w{i}" for i in range(12)]
    rig.join(*names)
    for i, name in enumerate(names):
        rig.hold(name, text(1, blocks=i + 1))
    receipt = rig.serve(text(1, blocks=20))
    assert receipt.candidates_total == 12 and len(receipt.candidates) == MAX_CANDIDATES + 1
    assert [c.worker for c in receipt.candidates] == [f"w{i}" for i in range(11, 2, -1)]


def test_what_is_not_known_is_null_and_not_zero(rig):
    receipt = as_json(rig.serve(unscored="no tokenizer"))
    for name in ("matched_tokens_at_route", "eligible_prefix_tokens", "actual_cached_tokens", "gate_loss_tokens"):
        assert receipt[name] is None
    refused = as_json(Rig().arrive(text(1))[-1].receipt)
    for name in ("chosen_worker", "ttft_ms", "actual_local_hits", "worker_queue_at_route", "decision_us"):
        assert refused[name] is None


def test_a_receipt_survives_its_line(rig):
    receipt = rig.serve(text(1), cached=0)
    assert msgspec.json.decode(msgspec.json.encode(receipt), type=Receipt) == receipt


@pytest.mark.covers("RT-01")
def test_every_eligible_token_is_a_hit_or_lost_at_one_gate(rig):
    rng = np.random.default_rng(2)
    for name, blocks in (("a", 30), ("b", 45)):
        rig.hold(name, text(1, blocks=blocks))
    for _ in range(40):
        receipt = rig.serve(text(1, blocks=60), cached=int(rng.integers(0, 61)) * SIZE)
        losses = receipt.gate_loss_tokens
        assert losses.total + receipt.actual_cached_tokens == receipt.eligible_prefix_tokens
        assert min(losses.prefix, losses.route, losses.residency, losses.transfer) >= 0
