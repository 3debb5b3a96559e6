"""The worked example as a receipt: worker A 100 blocks - 45 = 55, worker B 80 blocks - 5 = 75, 76 hit in reality."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from kvrelay.core.model.units import IndexState, RouteReason, Status
from kvrelay.core.receipts.receipt import Attempt, Candidate, GateLoss, Receipt

BLOCK_SIZE = 16


def candidate(worker: str, blocks: int, debit: float) -> Candidate:
    return Candidate(
        worker=worker,
        incarnation="1",
        rank=0,
        matched_tokens={"gpu": blocks * BLOCK_SIZE},
        load={"active_requests": 2, "active_prefill_tokens": 1000},
        terms={"reuse_credit": float(blocks), "prefill_debit": -debit, "decode_debit": 0.0},
        score=blocks - debit,
    )


WORKED_EXAMPLE = Receipt(
    request_id="r-1",
    session_id="s-1",
    tenant="default",
    path="/v1/completions",
    model="m",
    prefix_fingerprint="f00d",
    policy="cache_load",
    eligible_prefix_blocks=100,
    eligible_prefix_tokens=1600,
    block_size=BLOCK_SIZE,
    chosen_worker="B",
    incarnation="1",
    rank=0,
    matched_blocks_at_route=80,
    matched_tokens_at_route=1280,
    matched_tiers_at_route={"gpu": 1280},
    worker_queue_at_route=1,
    load_snapshot=9,
    route_reason=RouteReason.CACHE_SPILL,
    spilled_from="A",
    candidates_total=2,
    candidates=(candidate("B", 80, 5.0), candidate("A", 100, 45.0)),
    index_state=IndexState.LIVE,
    attempts=(Attempt(1, "B", "1", 0, RouteReason.CACHE_SPILL, 0.2),),
    actual_local_hits=76,
    actual_cached_tokens=1216,
    gate_loss_tokens=GateLoss(prefix=0, route=320, residency=64, transfer=0),
    arrived_ms=1000.0,
    ttft_ms=41.5,
    itl_ms=(9.0, 11.0),
    e2e_ms=80.25,
    decision_us=35.0,
    prompt_tokens=1605,
    completion_tokens=4,
    status=Status.OK,
    http_status=200,
    engine="mock",
    models_payload=False,
    manifest_digest="d1",
)


def receipt(request_id: str = "r-1", **changes: Any) -> Receipt:
    return replace(WORKED_EXAMPLE, request_id=request_id, **changes)
