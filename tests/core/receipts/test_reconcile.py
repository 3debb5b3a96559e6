"""Claims against outcomes over many receipts."""

from __future__ import annotations

import pytest

from kvrelay.core.receipts.reconcile import reconcile, stale_index_tokens
from tests.core.routing.rig import SIZE, Rig, text


@pytest.mark.covers("RC-12")
def test_differences_are_kept_with_their_sign_and_unknowns_are_counted():
    rig = Rig()
    rig.join("a")
    rig.hold("a", text(1, blocks=8))
    for cached in (8, 6, 9, None):
        rig.serve(text(1, blocks=10), cached=None if cached is None else cached * SIZE)
    rig.serve(unscored="image", cached=0)
    result = reconcile(rig.receipts)
    assert result.stale_index_tokens == (0, 2 * SIZE, -SIZE)
    assert (result.receipts, result.compared, result.claim_unknown, result.actual_unknown) == (5, 3, 1, 1)
    assert (result.claimed_tokens, result.actual_tokens) == (24 * SIZE, 23 * SIZE)
    assert result.within_one_block == 2
    assert stale_index_tokens(rig.receipts[-1]) is None
