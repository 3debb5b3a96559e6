from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.traces.words import text_of

token_ids = st.lists(st.integers(0, 200_000), max_size=12)


@given(token_ids, token_ids)
def test_texts_are_equal_exactly_when_the_ids_are(left: list[int], right: list[int]) -> None:
    texts = [text_of(np.array(ids, dtype=np.uint32)) for ids in (left, right)]

    assert (texts[0] == texts[1]) == (left == right)
    assert all(text.count(" ") == len(ids) for text, ids in zip(texts, (left, right), strict=True))


def test_text_of_a_prefix_is_a_prefix() -> None:
    ids = np.arange(300, 340, dtype=np.uint32)

    assert text_of(ids).startswith(text_of(ids[:16]))
