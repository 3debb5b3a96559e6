"""cache_load decides the same over rows of few candidates as over arrays of many."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.load.ledger import Ledger
from kvrelay.core.policy.cache_load import CacheLoad
from kvrelay.core.policy.policy import NOT_BOUND, Arrays, Field
from kvrelay.core.policy.score_predict import PredictScorer
from kvrelay.core.policy.score_weights import WeightsScorer
from kvrelay.core.routing.settings import Weights

WEIGHTS = Weights(alpha=1.0, beta=0.013, gamma=0.37, delta=0.11)
tokens = st.integers(0, 4).map(lambda blocks: blocks * 16.0)
counts = st.integers(0, 3).map(float)
candidate = st.tuples(
    tokens,
    tokens,
    counts,
    counts,
    tokens,
    counts,
    counts,
    st.sampled_from([0.0, 5.5]),
    st.sampled_from([800.0, 3333.3]),
)


@pytest.mark.parametrize("scorer", [PredictScorer(), WeightsScorer(WEIGHTS)], ids=lambda scorer: scorer.name)
@given(st.lists(candidate, min_size=1, max_size=6), st.integers(0, 2**32), st.booleans())
def test_rows_and_arrays_lead_to_one_choice(scorer, candidates, draw, idle):
    ready, lower, active, queued, prefill, decode, foreign, recent, rate = map(np.array, zip(*candidates, strict=True))
    arrays = Arrays(
        ready_tokens=ready,
        reachable_tokens=ready + lower,
        transfer_ms=None if idle else lower * 0.02,
        load=np.array([active + queued, queued, prefill, decode, foreign, recent, active + foreign]),
        backlog_tokens=None if idle else prefill * 0.4,
        growth_tokens=None if idle else active * 20.0,
        prefill_tokens_per_s=rate,
        foreign_prefill_tokens=48.0,
        prompt_tokens=64,
        block_size_tokens=16,
    )
    whole = {
        "slots": np.arange(len(candidates)) * 2,
        "scored": True,
        "index_usable": True,
        "bound": NOT_BOUND,
        "has_session": False,
        "draw": draw,
    }
    policy, ledger = CacheLoad(scorer), Ledger(initial_prefill_tokens_per_s=1.0)
    many = policy.choose(0.0, Field(**whole, arrays=arrays), ledger)
    rows = tuple(arrays.row(at) for at in range(len(candidates)))
    few = policy.choose(0.0, Field(**whole, rows=rows), ledger)
    assert (few.slot, few.reason, few.spilled_from) == (many.slot, many.reason, many.spilled_from)
    assert list(few.scores) == many.scores.tolist(), "to the last bit, or ties would be broken differently"
    for at in range(len(candidates)):
        assert few.terms_of(rows[at]) == many.terms_of(rows[at])
        assert sum(few.terms_of(rows[at]).values()) == pytest.approx(few.scores[at])
