"""Receipts in words: whole texts, so that nobody changes one by accident."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvrelay.core.model.units import FallbackReason, Fault, RouteReason, Status
from kvrelay.core.receipts.receipt import Attempt
from kvrelay.edge.observe.explain import REASONS, explain, terms_add_up
from tests.edge.observe.samples import WORKED_EXAMPLE, candidate, receipt


@pytest.mark.covers("RC-15", "RT-20", "RC-12", "RC-16")
def test_the_worked_example() -> None:
    assert explain(WORKED_EXAMPLE) == (
        "Request r-1 (session s-1, tenant default) for /v1/completions: ok, HTTP 200.\n"
        "  Policy cache_load sent it to B, because the worker with the better cache was too busy (cache_spill).\n"
        "  That worker is a mock: no KV tensor and no real latency stand behind its answers.\n"
        "  The better cache was on A.\n"
        "  Prompt 1605 tokens, of which 1600 tokens (100 full blocks) could come from a cache; answer 4 tokens.\n"
        "  Claimed when routing: 80 blocks, 1280 tokens (gpu 1280), index live.\n"
        "  Hit according to the engine: 76 blocks, 1216 tokens. The index claimed 64 tokens too many.\n"
        "  Candidates (2 of 2; highest score is best):\n"
        "    -> B: 80 reuse_credit - 5 prefill_debit + 0 decode_debit = 75\n"
        "         matched tokens: gpu 1280; load: active_requests 2, active_prefill_tokens 1000\n"
        "       A: 100 reuse_credit - 45 prefill_debit + 0 decode_debit = 55\n"
        "         matched tokens: gpu 1600; load: active_requests 2, active_prefill_tokens 1000\n"
        "  Eligible tokens that were not hit: 384: 320 because another worker held them (route);"
        " 64 because the worker no longer held them (residency).\n"
        "  Time to first token 41.5 ms, to the end 80.25 ms; the decision took 35 us.\n"
        "  Incarnation 1; engine mock.\n"
        "  Manifest d1."
    )


def test_what_is_unknown_is_said_to_be_unknown() -> None:
    text = explain(
        receipt(
            candidates=(),
            actual_cached_tokens=None,
            actual_local_hits=None,
            gate_loss_tokens=None,
            ttft_ms=None,
            route_reason=RouteReason.CACHE_NOT_SCORED,
            unscored_because="no tokenizer",
        )
    )
    assert "  Hit according to the engine: unknown blocks, unknown tokens. The two cannot be compared.\n" in text
    assert "  The prompt was not matched against the index: no tokenizer.\n" in text
    assert "Time to first token unknown ms" in text
    assert "not hit" not in text


def test_attempts_are_told_when_one_failed() -> None:
    failed = Attempt(1, "A", "1", 0, RouteReason.ROUND_ROBIN, 0.5, Fault.BACK_PRESSURE, 429)
    good = Attempt(2, "B", "1", 0, RouteReason.ROUND_ROBIN, 12.0)
    text = explain(receipt(attempts=(failed, good), fallback_reason=FallbackReason.RETRIED_ELSEWHERE))
    assert ("  Attempts:\n    1. A at 0.5 ms: failed: back_pressure, HTTP 429\n    2. B at 12 ms: answered\n") in text
    assert "  This was not its first choice: retried_elsewhere.\n" in text


def test_a_request_that_nobody_could_take() -> None:
    text = explain(
        receipt(
            chosen_worker=None,
            incarnation=None,
            candidates=(),
            route_reason=RouteReason.NOT_ROUTED,
            status=Status.REFUSED,
            http_status=503,
            failure_reason="no_worker",
        )
    )
    assert text.splitlines()[:2] == [
        "Request r-1 (session s-1, tenant default) for /v1/completions: refused, HTTP 503, no_worker.",
        "  It went to no worker: no worker could take it (not_routed).",
    ]


@pytest.mark.covers("RC-15")
def test_terms_that_do_not_add_up_are_shown() -> None:
    wrong = replace(candidate("B", 80, 5.0), score=76.0)
    assert not terms_add_up(wrong)
    assert "= 76 (the terms sum to 75!)" in explain(receipt(candidates=(wrong,)))


def test_a_policy_that_does_not_score_and_one_that_predicts() -> None:
    bare = replace(candidate("B", 80, 5.0), score=None, terms={})
    assert "(1 of 2; this policy does not score)" in explain(receipt(candidates=(bare,)))
    predicted = replace(bare, score=12.5, terms={"queue_ms": 10.0, "compute_ms": 2.5})
    assert "(1 of 2; score in ms, lowest is best)" in explain(receipt(candidates=(predicted,)))
    assert "10 queue_ms + 2.5 compute_ms = 12.5" in explain(receipt(candidates=(predicted,)))


def test_ids_from_clients_cannot_steer_a_terminal() -> None:
    text = explain(receipt("r\x1b[2J\nfake line", session_id="s\r\u202e"))
    assert text.startswith("Request r\\x1b[2J\\nfake line (session s\\r\\u202e, tenant default)")


@pytest.mark.covers("RC-08")
def test_every_reason_has_its_words() -> None:
    assert set(REASONS) == set(RouteReason)
