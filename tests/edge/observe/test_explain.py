"""Receipts in words: whole texts, so that nobody changes one by accident."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from kvrelay.core.model.units import FallbackReason, Fault, RouteReason, Status
from kvrelay.core.policy.policy import Arrays
from kvrelay.core.policy.score_predict import PredictScorer
from kvrelay.core.policy.score_weights import WeightsScorer
from kvrelay.core.receipts.receipt import Attempt, GateLoss
from kvrelay.core.routing.settings import Weights
from kvrelay.edge.observe.explain import explain, terms_add_up
from kvrelay.edge.observe.receipt_words import GATES, REASONS, TERMS
from tests.edge.observe.samples import WORKED_EXAMPLE, candidate, receipt


@pytest.mark.covers("RC-15", "RT-20", "RC-12", "RC-16")
def test_the_worked_example() -> None:
    assert explain(WORKED_EXAMPLE) == (
        "Request r-1 (session s-1, tenant default) for /v1/completions: ok, HTTP 200.\n"
        "  Policy cache_load sent it to B, because whoever held more of the prompt was too busy (cache_spill).\n"
        "  That worker is a mock: no KV tensor and no real latency stand behind its answers.\n"
        "  The worker that held more of it was A.\n"
        "  Prompt of 1,605 tokens, of which 1,600 tokens (100 full blocks) could come from a cache;"
        " answer of 4 tokens.\n"
        "  Claimed when routing: 1,280 tokens, 80 blocks; that worker's index was live.\n"
        "  Hit according to the engine: 1,216 tokens, 76 blocks. The index claimed 64 tokens too many.\n"
        "  Candidates, 2 of 2 (score in blocks, the highest is best):\n"
        "    -> B: 75 = 80 reuse_credit - 5 prefill_debit\n"
        "         holds 1,280 tokens in gpu; 2 active requests, 1,000 active prefill tokens\n"
        "       A: 55 = 100 reuse_credit - 45 prefill_debit\n"
        "         holds 1,600 tokens in gpu; 2 active requests, 1,000 active prefill tokens\n"
        "       reuse_credit: blocks that need not be computed\n"
        "       prefill_debit: prefill work there\n"
        "  Tokens that could be hit and were not: 384, of them 320 because another worker held them (route);"
        " 64 because the worker no longer held them (residency).\n"
        "  First token after 41.5 ms. End after 80.25 ms. Deciding took 35 us.\n"
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
    assert "  Hit according to the engine: unknown. The two cannot be compared.\n" in text
    assert "  The prompt was not matched against the index: no tokenizer.\n" in text
    assert "First token" not in text
    assert "could be hit" not in text


def test_attempts_are_told_when_one_failed() -> None:
    failed = Attempt(1, "A", "1", 0, RouteReason.ROUND_ROBIN, 0.5, Fault.BACK_PRESSURE, 429)
    good = Attempt(2, "B", "1", 0, RouteReason.ROUND_ROBIN, 12.0)
    text = explain(receipt(attempts=(failed, good), fallback_reason=FallbackReason.RETRIED_ELSEWHERE))
    assert ("  Attempts:\n    1. A at 0.5 ms: failed: back_pressure, HTTP 429\n    2. B at 12 ms: answered\n") in text
    assert "  That was not its first choice: an earlier attempt failed (retried_elsewhere).\n" in text


def test_a_stream_that_outlived_its_worker_is_told() -> None:
    lost = Attempt(1, "A", "1", 0, RouteReason.ROUND_ROBIN, 0.5, Fault.RESET)
    rest = Attempt(2, "B", "1", 0, RouteReason.ROUND_ROBIN, 312.0, continued=True)
    text = explain(receipt(attempts=(lost, rest), fallback_reason=FallbackReason.MIGRATED, migrations=1))
    assert (
        "  Attempts:\n    1. A at 0.5 ms: failed: reset\n    2. B at 312 ms: went on with the stream, answered\n"
        in text
    )
    assert "  Another worker had begun the answer and was lost in the middle of it (migrated).\n" in text


def test_a_stream_that_nobody_went_on_with_is_told() -> None:
    lost = Attempt(1, "A", "1", 0, RouteReason.ROUND_ROBIN, 0.5, Fault.RESET)
    text = explain(receipt(attempts=(lost,), status=Status.WORKER_LOST, not_migrated_because="logprobs"))
    assert "  Its stream broke and no other worker could go on with it: logprobs.\n" in text


def test_the_last_resort_is_told() -> None:
    text = explain(receipt(fallback_reason=FallbackReason.LAST_RESORT))
    assert "  Requests had failed there lately, but nobody better was left (last_resort).\n" in text


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
    assert ": 76 = 80 reuse_credit - 5 prefill_debit (the terms sum to 75!)" in explain(receipt(candidates=(wrong,)))


def test_a_policy_that_does_not_score_and_one_that_predicts() -> None:
    bare = replace(candidate("B", 80, 5.0), score=None, terms={})
    assert "Candidates, 1 of 2 (this policy does not score)" in explain(receipt(candidates=(bare,)))
    predicted = replace(bare, score=12.5, terms={"queue_ms": 10.0, "compute_ms": 2.5})
    assert "Candidates, 1 of 2 (predicted ms to the first token, the lowest is best)" in explain(
        receipt(candidates=(predicted,))
    )
    assert "12.5 = 10 queue_ms + 2.5 compute_ms" in explain(receipt(candidates=(predicted,)))


def test_ids_from_clients_cannot_steer_a_terminal() -> None:
    text = explain(receipt("r\x1b[2J\nfake line", session_id="s\r\u202e"))
    assert text.startswith("Request r\\x1b[2J\\nfake line (session s\\r\\u202e, tenant default)")


@pytest.mark.covers("RC-08")
def test_every_reason_has_its_words() -> None:
    assert set(REASONS) == set(RouteReason)
    assert set(GATES) == set(GateLoss.__struct_fields__)


def test_every_term_of_a_scorer_has_its_words() -> None:
    one = np.ones(1)
    arrays = Arrays(
        prompt_tokens=16,
        block_size_tokens=16,
        ready_tokens=one,
        reachable_tokens=one,
        transfer_ms=None,
        prefill_tokens_per_s=one,
        load=np.ones((7, 1)),
        backlog_tokens=one,
        growth_tokens=one,
        foreign_prefill_tokens=1.0,
    )
    weights = Weights(alpha=1.0, beta=1.0, gamma=1.0, delta=1.0)
    names = {name for scorer in (PredictScorer(), WeightsScorer(weights)) for name in scorer.terms(arrays.row(0))}
    assert names == set(TERMS)


def test_a_wait_for_a_place_and_a_clean_hit_are_told() -> None:
    text = explain(receipt(router_queue_ms=12.0, gate_loss_tokens=GateLoss(0, 0, 0, 0)))
    assert "  Every token that could be hit was hit.\n  Waited 12 ms for a place. First token after 41.5 ms." in text
