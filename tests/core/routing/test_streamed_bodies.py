"""What the router makes of bodies that were passed on, of errors that passed whole, and of TLS that failed."""

from __future__ import annotations

import pytest

from kvrelay.core.model.effects import BreakOff, CancelAttempt, Dispatch, PassThrough, Refuse, WriteReceipt
from kvrelay.core.model.events import ClientLeft
from kvrelay.core.model.units import Fault, Status
from tests.core.routing.rig import Rig


def asked(**settings: object) -> Rig:
    rig = Rig(retry_attempts=3, **settings)
    rig.join("a", "b")
    rig.arrive()
    return rig


@pytest.mark.parametrize(
    ("fault", "status", "ending", "final"),
    [
        (Fault.RESET, None, Refuse, Status.WORKER_LOST),
        (Fault.SERVER_ERROR, 500, PassThrough, Status.ERROR),
        (Fault.BACK_PRESSURE, 503, PassThrough, Status.REFUSED),
    ],
)
def test_a_body_that_nobody_has_any_more_is_not_sent_again(
    fault: Fault, status: int | None, ending: type, final: Status
) -> None:
    rig = asked()
    effects = rig.fail(fault, http_status=status, body_spent=True)
    assert [type(effect) for effect in effects if not isinstance(effect, WriteReceipt)][-1] is ending
    (receipt,) = rig.receipts
    assert (receipt.status, receipt.not_retried_because, len(receipt.attempts)) == (final, "body_streamed", 1)


def test_a_body_of_which_nothing_was_sent_is_tried_elsewhere() -> None:
    rig = asked()
    assert [type(effect) for effect in rig.fail(Fault.CONNECT)][-1] is Dispatch
    assert rig.receipts == []


def test_an_error_that_passed_whole_ends_the_request_without_a_further_word() -> None:
    rig = asked()
    effects = rig.fail(Fault.SERVER_ERROR, http_status=500, relayed=True, whole=True)
    assert not any(isinstance(effect, (BreakOff, PassThrough, Refuse, Dispatch)) for effect in effects)
    (receipt,) = rig.receipts
    assert (receipt.status, receipt.failure_reason, receipt.http_status) == (Status.ERROR, "server_error", 500)


def test_a_request_that_we_had_to_refuse_in_the_middle_is_its_clients_error() -> None:
    rig = asked()
    effects = rig.step(ClientLeft(rig.last, (), 408, "too slow"))
    assert isinstance(effects[0], CancelAttempt)
    (receipt,) = rig.receipts
    assert (receipt.status, receipt.http_status, receipt.failure_reason) == (Status.CLIENT_ERROR, 408, "too slow")
    rig.arrive()
    rig.step(ClientLeft(rig.last))
    assert (rig.receipts[-1].status, rig.receipts[-1].http_status) == (Status.CLIENT_CANCELLED, None)


def test_a_worker_that_is_not_who_it_should_be_is_out_at_once() -> None:
    rig = asked()
    first = next(effect for effect in rig.effects if isinstance(effect, Dispatch)).worker.name
    rig.fail(Fault.TLS, detail="its certificate is not accepted")
    assert [worker.up for worker in rig.router.status(rig.now).workers if worker.name == first] == [False]
    rig.fail(Fault.TLS, attempt=2)
    (receipt,) = rig.receipts
    assert (receipt.status, receipt.failure_reason, receipt.http_status) == (Status.WORKER_LOST, "worker_tls", 502)
