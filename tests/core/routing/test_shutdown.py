"""The router while its gateway is being shut down: who is refused, who is cut, and what the receipts say."""

from __future__ import annotations

import pytest

from kvrelay.core.model.effects import BreakOff, CancelAttempt, Refuse, WriteReceipt
from kvrelay.core.model.events import DrainStarted, RequestCut
from kvrelay.core.model.units import Status
from tests.core.routing.rig import Rig, text


@pytest.mark.covers("OP-11")
def test_who_comes_while_draining_is_refused_and_who_is_here_goes_on() -> None:
    rig = Rig()
    rig.join("a")
    rig.arrive(text(1), request_id="here")
    rig.step(DrainStarted(retry_after_s=7.0))
    assert rig.router.draining
    refusal, _ = rig.arrive(text(1), request_id="late")
    assert refusal == Refuse("late", 503, "gateway_draining", 7.0)
    assert rig.finish("here").status is Status.OK
    late = next(receipt for receipt in rig.receipts if receipt.request_id == "late")
    assert (late.status, late.failure_reason, late.chosen_worker) == (Status.REFUSED, "gateway_draining", None)


@pytest.mark.covers("OP-11", "RC-11")
@pytest.mark.parametrize(
    ("relayed", "ending", "http_status"),
    [
        (False, Refuse("r", 503, "drain_grace_over", 1.0), 503),
        (True, BreakOff("r", Status.ERROR, "drain_grace_over"), 200),
    ],
)
def test_what_is_cut_is_our_doing_and_neither_the_clients_nor_the_workers(relayed, ending, http_status) -> None:
    rig = Rig()
    rig.join("a")
    rig.arrive(text(1), request_id="r")
    cut = RequestCut("r", "drain_grace_over", relayed, 200 if relayed else None)
    cancel, ended, written = rig.step(cut)
    assert (cancel, ended) == (CancelAttempt("r", 1), ending)
    assert isinstance(written, WriteReceipt)
    receipt = written.receipt
    assert (receipt.status, receipt.failure_reason) == (Status.ERROR, "drain_grace_over")
    assert (receipt.http_status, receipt.attempts[0].fault) == (http_status, None)
    assert rig.load("a") == [0, 0, 0]
    assert rig.step(cut) == (), "its one receipt is written"


def test_what_waits_for_a_place_is_cut_as_well() -> None:
    rig = Rig(queue_depth=5)
    rig.join("a", max_active_requests=1)
    rig.arrive(text(1), request_id="first")
    rig.arrive(text(2), request_id="waiting")
    refusal, written = rig.step(RequestCut("waiting", "gateway_stopped"))
    assert refusal == Refuse("waiting", 503, "gateway_stopped", 1.0)
    assert written.receipt.attempts == ()
    assert rig.router.status(rig.now).queue_depth == 0
