"""New settings under a running router: what changed takes effect, what did not is left alone."""

from __future__ import annotations

from msgspec.structs import replace

from kvrelay.core.model.effects import Refuse
from kvrelay.core.model.events import PolicyChanged, ProbeAnswered, SettingsChanged, WokeUp, WorkerDrained, WorkerLeft
from kvrelay.core.model.units import Fault
from kvrelay.core.routing.settings import Weights
from tests.core.routing.rig import Rig, chosen, text


def change(rig: Rig, **settings) -> tuple:
    return rig.step(SettingsChanged(replace(rig.router.settings, **settings)))


def test_a_policy_that_was_switched_while_running_stays_unless_the_settings_name_another() -> None:
    rig = Rig(policy="cache_load")
    rig.step(PolicyChanged("round_robin"))
    change(rig, retry_attempts=1)
    assert rig.router.policy.name == "round_robin"
    change(rig, policy="sticky")
    assert rig.router.policy.name == "sticky"


def test_weights_reach_the_scorer_in_use() -> None:
    rig = Rig(policy="cache_load", scorer="weights")
    rig.join("a", "b")
    rig.hold("a", text(1, blocks=10))
    change(rig, weights=Weights(alpha=7.0))
    rig.arrive(text(1, blocks=10))
    receipt = rig.finish()
    assert receipt.candidates[0].terms["reuse_credit"] == 70.0


def test_new_limits_of_retries_and_health_count_at_once() -> None:
    rig = Rig(retry_attempts=3, health_failures=9)
    rig.join("a", "b")
    change(rig, retry_attempts=1, health_failures=1)
    rig.arrive(text(1))
    rig.fail(Fault.RESET)
    assert rig.receipts[-1].failure_reason == "worker_lost", "a second attempt is not allowed any more"
    rig.step(ProbeAnswered(rig.live_id("b"), False))
    up = {worker.name: worker.up for worker in rig.router.status(rig.now).workers}
    assert up["b"] is False


def test_sessions_live_as_long_as_the_new_settings_say() -> None:
    rig = Rig(policy="sticky", affinity_ttl_s=300.0)
    rig.join("a", "b")
    rig.serve(text(1), session_id="s")
    rig.now += 50
    change(rig, affinity_ttl_s=10.0)
    rig.step(WokeUp())
    assert rig.router.sessions() == {}
    rig.serve(text(1), session_id="t")
    change(rig, affinity_ttl_s=None)
    assert rig.router.sessions() == {}


def test_who_waits_stays_and_waits_as_long_as_the_new_settings_allow() -> None:
    rig = Rig(queue_depth=5, queue_wait_s=30.0)
    rig.join("a", max_active_requests=1)
    rig.arrive(text(1), request_id="runs")
    for name in ("one", "two"):
        rig.arrive(text(2), request_id=name)
    change(rig, queue_depth=1, queue_wait_s=5.0)
    assert rig.router.status(rig.now).queue_depth == 2
    (refusal, *_) = rig.arrive(text(3), request_id="three")
    assert isinstance(refusal, Refuse) and refusal.reason == "queue_full"
    rig.now += 6
    effects = rig.step(WokeUp())
    assert [each.request_id for each in effects if isinstance(each, Refuse)] == ["one", "two"]


def test_a_worker_can_be_drained_before_it_answers_and_forgets_it_when_it_is_removed() -> None:
    rig = Rig()
    rig.step(WorkerDrained("late"))
    rig.join("late", "other")
    assert {rig.ask(text(1)) for _ in range(4)} == {"other"}
    rig.step(WorkerLeft("late"))
    rig.join("late")
    rig.leave("other")
    assert chosen(rig.arrive(text(1))) == "late"
