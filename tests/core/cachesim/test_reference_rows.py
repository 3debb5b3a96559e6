"""Our figures are those of an independent simulation of the same traces (small ones here; all rows in `tests/real`)."""

from __future__ import annotations

import pytest
from tests.core.cachesim.reference import agreeing, capacity_figures, rows

QUICK = ("mooncake_arxiv_toolmix_93.jsonl", "mooncake_conversation_first1000.jsonl")


@pytest.mark.skipif(not rows()["capacity"], reason="the reference values are not at hand")
@pytest.mark.covers("TU-03")
@pytest.mark.parametrize("name", QUICK)
def test_capacity_rows_are_reproduced(name):
    chosen = [row for row in rows()["capacity"] if row["file"] == name]
    assert len(chosen) >= 30
    for row in chosen:
        figures = capacity_figures(row)
        assert figures == agreeing(figures, row), row
