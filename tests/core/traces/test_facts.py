from __future__ import annotations

import pytest
from tests.core.traces.public_traces import needs_public_traces, public_trace

from kvrelay.core.traces.facts import examine
from kvrelay.core.traces.presets import preset
from kvrelay.core.traces.trace import GLOBAL_SCOPE, NO_BLOCKS, NO_SCOPE, SESSION_SCOPE, Session, Trace, Turn


@pytest.mark.covers("BM-17")
def test_local_ids_are_a_limitation_that_the_facts_name() -> None:
    turns = (Turn(0.0, 0.0, (1, 2), 20, 5), Turn(50.0, 45.0, (1, 2, 3), 30, 5))
    facts = examine(Trace(10, SESSION_SCOPE, (Session("a", "a", turns),))).facts

    assert "reuse across sessions is understated" in facts.limitations[0]
    assert (facts.derived_sessions, facts.partial_tails, facts.span_ms, facts.requests_per_s) == (None, 0, 50.0, 20.0)
    assert facts.lengths.think_ms.p50 == 45.0
    (cache,) = facts.endless_cache
    assert (cache.token_hit, cache.block_shares and cache.block_shares.same_session) == (0.4, 0.4)


def test_nothing_is_said_about_reuse_where_there_are_no_ids() -> None:
    facts = examine(Trace(NO_BLOCKS, NO_SCOPE, (Session("a", "", (Turn(0.0, 0.0, (), 20, 5),)),))).facts

    assert (facts.endless_cache, facts.block_size_tokens, facts.derived_sessions) == ((), None, None)


def test_an_empty_trace_has_no_figures() -> None:
    facts = examine(Trace(16, GLOBAL_SCOPE, ())).facts

    assert (facts.requests, facts.requests_per_s, facts.lengths.input_tokens.count) == (0, None, 0)


def test_idle_times_are_since_the_last_use() -> None:
    requests = examine(preset("cold_warm_restart").trace).requests

    assert {request.idle_ms for request in requests[:12]} == {None}
    assert all(request.idle_ms is not None and request.idle_ms > 900 for request in requests[12:])


@needs_public_traces
def test_sharing_within_derived_sessions_of_a_public_trace() -> None:
    facts = examine(public_trace("mooncake_conversation_first1000.jsonl")).facts

    assert (facts.derived_sessions, facts.sessions, facts.partial_tails) == (814, 1000, 998)
    listed, full = facts.endless_cache
    assert (listed.token_hit, full.tail_rule) == (0.215742, "full")
    shares = listed.block_shares
    assert shares is not None
    parts = (shares.same_session, shares.family, shares.other_sessions, shares.never_seen)
    assert sum(parts) == pytest.approx(1.0) and shares.same_session > shares.other_sessions > 0
