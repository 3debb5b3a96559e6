"""Epochs: who shares keys with whom after a rotation, and which lives of workers are of the past."""

from __future__ import annotations

from itertools import combinations

import pytest

from kvrelay.core.model.events import EpochRotated, WorkerJoined, WorkerSpec
from kvrelay.core.model.ids import WorkerId
from kvrelay.core.model.prompt import Tenant
from kvrelay.core.model.units import Trigger
from kvrelay.core.routing import epochs as module
from kvrelay.core.routing.epochs import Epochs
from kvrelay.core.routing.router import Router
from kvrelay.core.routing.settings import RouterSettings

A, B = WorkerId("a", "1"), WorkerId("b", "1")
SALTING, MIXING = WorkerSpec("http://a", separates_salts=True), WorkerSpec("http://b", separates_salts=False)
FLEET = ((A, SALTING), (B, MIXING))


@pytest.mark.covers("DR-12", "SG-19")
@pytest.mark.parametrize("trigger", [Trigger.REVISION, Trigger.TOKENIZER, Trigger.TEMPLATE])
def test_a_rotation_of_the_fleet_gives_every_request_other_keys(trigger: Trigger) -> None:
    epochs = Epochs()
    before = epochs.tag("acme", "ad")
    epochs.rotate(EpochRotated(trigger), FLEET)
    assert epochs.tag("acme", "ad") != before
    assert epochs.salted(Tenant("acme", salt="s"), epochs.tag("acme", None)).salt == "s~epoch-1"


@pytest.mark.covers("DR-12")
@pytest.mark.parametrize(
    ("event", "changed", "same"),
    [
        (EpochRotated(Trigger.TENANT_POLICY, tenant="acme"), ("acme", None), ("other", None)),
        (EpochRotated(Trigger.ADAPTER, adapter="ad"), ("acme", "ad"), ("acme", None)),
    ],
)
def test_a_rotation_of_one_tenant_or_adapter_leaves_the_others(
    event: EpochRotated, changed: tuple[str, str | None], same: tuple[str, str | None]
) -> None:
    epochs = Epochs()
    before = epochs.tag(*changed), epochs.tag(*same)
    epochs.rotate(event, FLEET)
    assert epochs.tag(*changed) != before[0] and epochs.tag(*same) == before[1]


def test_no_two_epochs_of_a_request_are_alike_whatever_was_rotated() -> None:
    epochs, seen = Epochs(), []
    for event in [
        EpochRotated(Trigger.TENANT_POLICY, tenant="t"),
        EpochRotated(Trigger.ADAPTER, adapter="x"),
        EpochRotated(Trigger.TEMPLATE),
        EpochRotated(Trigger.TENANT_POLICY, tenant="t"),
        EpochRotated(Trigger.ADAPTER, adapter="x"),
        EpochRotated(Trigger.TEMPLATE),
    ]:
        epochs.rotate(event, FLEET)
        seen.append(epochs.tag("t", "x"))
    assert all(one != other for one, other in combinations(seen, 2))


def test_the_first_epoch_adds_no_salt() -> None:
    tenant = Tenant("acme", salt="s")
    assert Epochs().salted(tenant, Epochs().tag("acme", None)) is tenant


@pytest.mark.covers("SG-20")
def test_new_software_retires_all_that_are_not_named_and_other_triggers_only_who_mixes_salts() -> None:
    assert Epochs().rotate(EpochRotated(Trigger.REVISION, keep=("b",)), FLEET) == (A,)
    assert Epochs().rotate(EpochRotated(Trigger.TEMPLATE), FLEET) == (B,)


def test_a_new_life_is_current_and_the_old_one_stays_of_the_past_over_a_restart_of_the_router() -> None:
    epochs = Epochs()
    epochs.rotate(EpochRotated(Trigger.REVISION), FLEET)
    restarted = Epochs(epochs.state)
    assert restarted.joined(A) and restarted.tag("t", None) == "1"
    assert not restarted.joined(WorkerId("a", "2"))
    assert not restarted.is_retired(A)  # the name is in its new life


def test_a_reset_is_enough_for_who_mixes_salts_and_not_for_old_software() -> None:
    epochs = Epochs()
    epochs.rotate(EpochRotated(Trigger.TEMPLATE), FLEET)
    assert epochs.emptied(B) and not epochs.is_retired(B)
    epochs.rotate(EpochRotated(Trigger.REVISION), FLEET)
    assert not epochs.emptied(A) and epochs.is_retired(A)


def test_too_many_scopes_rotate_the_fleet_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SCOPES", 2)
    epochs = Epochs()
    for tenant in ("a", "b", "c"):
        epochs.rotate(EpochRotated(Trigger.TENANT_POLICY, tenant=tenant), FLEET)
    assert epochs.state.fleet == 1 and not epochs.state.tenants


def test_the_router_knows_beforehand_who_would_be_left() -> None:
    router = Router(RouterSettings())
    for worker, spec in FLEET:
        router.step(0.0, WorkerJoined(worker, spec))
    assert router.left_by(EpochRotated(Trigger.TEMPLATE)) == ("a",)
    assert router.left_by(EpochRotated(Trigger.REVISION)) == ()
    assert router.left_by(EpochRotated(Trigger.REVISION, keep=("b",))) == ("b",)
    router.step(1.0, EpochRotated(Trigger.REVISION, keep=("b",)))
    assert [worker.retired for worker in router.status(1.0).workers] == [True, False]
    router.step(2.0, WorkerJoined(WorkerId("a", "2"), SALTING))
    assert not any(worker.retired for worker in router.status(2.0).workers)
