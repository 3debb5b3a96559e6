from __future__ import annotations

import numpy as np
import pytest

from kvrelay.core.stats.seen_before import SeenBefore


def tokens(*values: int) -> np.ndarray:
    return np.repeat(np.array(values, dtype=np.uint32), 4)


@pytest.mark.covers("SM-03")
def test_only_a_prefix_of_whole_blocks_that_was_sent_before_counts() -> None:
    seen = SeenBefore(4)

    assert seen.take(tokens(1, 2, 3)) == 0
    assert seen.take(tokens(1, 2, 9, 3)) == 8
    assert seen.take(tokens(2, 3)) == 0  # the same blocks in another chain are other blocks
    assert seen.take(np.append(tokens(1, 2, 9), np.uint32(7))) == 12
    assert seen.take(tokens(1, 2, 3)) == 8  # the last token of a prompt is always computed
