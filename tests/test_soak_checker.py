"""The judge of the soak sees each kind of damage: a history that is in order, and what it says once one is not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from bench.soak.checker import History, judge
from bench.soak.clients import Sent
from bench.soak.nemesis import Death
from bench.soak.watch import Moment

from kvrelay.core.model.units import Fault, RouteReason, Status
from kvrelay.core.receipts.receipt import Attempt, Receipt
from kvrelay.lab.replay.client import Outcome

STATUS: dict[str, Any] = {
    "live_requests": 0,
    "in_flight_prompts": 0,
    "gateway": {"open_requests": 0, "open_upstream_calls": 0, "receipts_dropped": 0},
    "workers": [
        {
            "name": name,
            "targets": [
                {"active_requests": 0, "queued_requests": 0, "active_prefill_tokens": 0, "active_decode_blocks": 0}
            ],
        }
        for name in ("a", "b", "c")
    ],
}


def sent(name: str, **outcome: Any) -> Sent:
    seen = Outcome(sent_s=0.0, http_status=200, token_times_s=[1.0, 2.0], done=True)
    return Sent(name, "s", 2, written=True, outcome=msgspec.structs.replace(seen, **outcome), right_text=True)


def receipt(name: str, status: Status = Status.OK, *faults: Fault | None, **members: Any) -> Receipt:
    attempts = tuple(
        Attempt(number, worker, f"{worker}-1", 0, RouteReason.ROUND_ROBIN, 0.0, fault=fault)
        for number, (worker, fault) in enumerate(zip("abc", faults or (None,), strict=False), start=1)
    )
    known: dict[str, Any] = {
        "request_id": name,
        "session_id": "s",
        "tenant": "default",
        "path": "/v1/completions",
        "model": "m",
        "prefix_fingerprint": None,
        "policy": "round_robin",
        "eligible_prefix_blocks": 2,
        "eligible_prefix_tokens": 32,
        "block_size": 16,
        "chosen_worker": attempts[-1].worker,
        "incarnation": attempts[-1].incarnation,
        "rank": 0,
        "matched_blocks_at_route": 2,
        "matched_tokens_at_route": 32,
        "matched_tiers_at_route": {},
        "worker_queue_at_route": 0,
        "load_snapshot": 0,
        "route_reason": RouteReason.ROUND_ROBIN,
        "spilled_from": None,
        "candidates_total": 4,
        "attempts": attempts,
        "actual_cached_tokens": 16,
        "completion_tokens": 2,
        "status": status,
        "http_status": 200,
    }
    return Receipt(**{**known, **members})


def page(requests: int) -> str:
    name = "kvrelay_requests_total"
    lines = [f"# TYPE {name} counter", f"{name} {requests}"]
    for other, value in (("actual_cached_tokens", 16), ("eligible_tokens", 32)):
        lines += [f"# TYPE kvrelay_{other}_total counter", f"kvrelay_{other}_total {value * requests}"]
    return "\n".join(lines) + "\n"


def moments(rss_mb: tuple[float, float]) -> list[Moment]:
    return [Moment(float(second), rss_mb[second >= 10], 50, 0.0, 1) for second in range(20)]


def history(**changes: Any) -> History:
    in_order: dict[str, Any] = {
        "sent": [sent("r1"), sent("r2")],
        "receipts": [receipt("r1"), receipt("r2")],
        "deaths": {},
        "status_at_end": STATUS,
        "metrics_at_end": page(2),
        "repeated": frozenset(("r1", "r2")),
        "wrong_reuse_blocks": 0,
        "gateway_log": "worker_up worker=a",
        "moments": moments((80.0, 81.0)),
        "fds_at_rest": 40,
        "fds_at_end": 41,
    }
    return History(**{**in_order, **changes})


def failing(judged: History) -> list[str]:
    return [each.promise for each in judge(judged) if each.verdict != "pass"]


LOST = Death("a", "killed", 0.0, -9)
BROKEN = {"failure": "broken", "done": False}


def with_first(one_sent: Sent, one_receipt: Receipt, **changes: Any) -> History:
    return history(sent=[one_sent, sent("r2")], receipts=[one_receipt, receipt("r2")], **changes)


def test_a_history_in_order_passes() -> None:
    assert failing(history()) == []


def test_a_stream_that_had_begun_on_a_killed_worker_is_excused_and_counted() -> None:
    lost = receipt("r1", Status.WORKER_LOST, Fault.RESET)
    assert failing(with_first(sent("r1", **BROKEN), lost, deaths={"a-1": LOST})) == []


@pytest.mark.parametrize(
    ("damaged", "promise"),
    [
        (history(receipts=[receipt("r1")], metrics_at_end=page(1)), "exactly one receipt per request"),
        (
            history(receipts=[receipt("r1"), receipt("r1"), receipt("r2")], metrics_at_end=page(3)),
            "exactly one receipt per request",
        ),
        (
            history(receipts=[receipt("r1"), receipt("r2"), receipt("r3")], metrics_at_end=page(3)),
            "exactly one receipt per request",
        ),
        (with_first(sent("r1"), receipt("r1", Status.ERROR)), "the receipt's status is what the client saw"),
        (
            with_first(sent("r1", **BROKEN), receipt("r1", Status.WORKER_LOST, Fault.RESET)),
            "no request lost beyond these",
        ),
        (
            with_first(
                sent("r1", **BROKEN),
                receipt("r1", Status.WORKER_LOST, Fault.RESET),
                deaths={"a-1": Death("a", "terminated", 0.0, 0)},
            ),
            "no request lost beyond these",
        ),
        (
            with_first(
                sent("r1", http_status=503, **BROKEN),
                receipt("r1", Status.REFUSED, Fault.BACK_PRESSURE, http_status=503),
            ),
            "no request lost beyond these",
        ),
        (with_first(sent("r1", token_times_s=[1.0]), receipt("r1")), "complete answers are whole"),
        (with_first(sent("r1"), receipt("r1", completion_tokens=3)), "complete answers are whole"),
        (
            with_first(Sent("r1", "s", 2, True, sent("r1").outcome, right_text=False), receipt("r1")),
            "every complete answer says what an undisturbed worker says",
        ),
        (
            with_first(
                sent("r1", **BROKEN),
                receipt("r1", Status.WORKER_LOST, Fault.RESET, not_migrated_because="budget_spent"),
                deaths={"a-1": LOST},
                migrates=True,
            ),
            "no request lost beyond these",
        ),
        (
            history(status_at_end={**STATUS, "live_requests": 1}),
            "all gauges 0 at the end",
        ),
        (history(metrics_at_end=page(3)), "metrics count what receipts count"),
        (
            with_first(sent("r1"), receipt("r1", matched_tokens_at_route=320)),
            "after healing, claimed = actual within a block for 95%",
        ),
        (history(wrong_reuse_blocks=1), "no wrong KV reused"),
        (history(deaths={"b-1": Death("b", "died", 0.0, 1)}), "workers ended only as planned"),
        (history(gateway_log="12:00 ERROR it broke"), "no error in the gateway's log"),
        (history(moments=moments((80.0, 90.0))), "memory flat within 10 % after the warm-up"),
        (history(moments=moments((80.0, 81.0))[:6]), "memory flat within 10 % after the warm-up"),
        (history(fds_at_end=60), "no socket or descriptor left open"),
    ],
)
def test_each_kind_of_damage_is_seen(damaged: History, promise: str) -> None:
    assert failing(damaged) == [promise]


def test_a_worker_tried_twice_is_seen() -> None:
    once = receipt("r1", Status.OK, Fault.RESET, None)
    twice = tuple(msgspec.structs.replace(attempt, worker="a") for attempt in once.attempts)
    damaged = with_first(sent("r1"), msgspec.structs.replace(once, attempts=twice))
    assert failing(damaged) == ["no worker tried twice for one request"]


def refused_by_all(count: int) -> History:
    names = [f"r{number}" for number in range(count)]
    refused = {"http_status": 503, "not_retried_because": "all_tried"}
    return history(
        sent=[sent(name, http_status=503, failure="HTTP 503") for name in names],
        receipts=[receipt(name, Status.REFUSED, *[Fault.BACK_PRESSURE] * 3, **refused) for name in names],
        metrics_at_end=page(count),
        repeated=frozenset(names),
    )


def test_a_refusal_by_every_worker_is_excused_only_while_it_is_rare() -> None:
    assert failing(refused_by_all(2)) == []
    assert failing(refused_by_all(3)) == ["no request lost beyond these"]


def test_a_refusal_for_want_of_budget_is_not_excused() -> None:
    refused = receipt("r1", Status.ERROR, Fault.SERVER_ERROR, http_status=500, not_retried_because="budget_spent")
    assert failing(with_first(sent("r1", http_status=500, **BROKEN), refused)) == ["no request lost beyond these"]
