"""Block keys: chained, keyed, and different for everything that must not be confused."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.contract.keys import Keyer

KEYER = Keyer(b"seed")
TOKENS = np.arange(1, 65, dtype=np.uint32)


def keys(tokens=TOKENS, size=16, keyer=KEYER, **tags):
    return keyer.prompt_keys(np.asarray(tokens, dtype=np.uint32), size, **tags).tolist()


def test_one_key_per_full_block_and_none_for_the_tail():
    assert [len(keys(TOKENS[:n])) for n in (0, 15, 16, 17, 63, 64)] == [0, 0, 1, 1, 3, 4]


@given(st.lists(st.integers(0, 2**32 - 1), min_size=32, max_size=160), st.integers(0, 9))
def test_a_changed_token_changes_its_block_and_all_later_keys_but_no_earlier_one(tokens, block):
    block %= len(tokens) // 16
    changed = list(tokens)
    changed[block * 16 + 3] ^= 1
    before, after = keys(tokens), keys(changed)
    assert before[:block] == after[:block]
    assert all(a != b for a, b in zip(before[block:], after[block:], strict=True))


@given(st.lists(st.integers(0, 200_000), min_size=16, max_size=400), st.integers(0, 30), st.sampled_from([1, 3, 8, 16]))
def test_a_chain_can_be_continued_from_any_of_its_blocks(tokens, cut, size):
    whole = keys(tokens, size)
    cut %= len(whole)
    parent = whole[cut - 1] if cut else KEYER.root(size)
    rest = KEYER.extend(parent, cut, np.array(tokens[cut * size :], dtype=np.uint32), size)
    assert whole[cut:] == rest.tolist()


def test_exchanging_two_blocks_or_two_tokens_changes_the_keys():
    swapped_blocks = np.concatenate([TOKENS[16:32], TOKENS[:16], TOKENS[32:]])
    swapped_tokens = TOKENS.copy()
    swapped_tokens[[0, 1]] = swapped_tokens[[1, 0]]
    for other in (swapped_blocks, swapped_tokens):
        assert set(keys(other)) & set(keys()) == set()


@pytest.mark.covers("S18", "RT-29")
def test_tags_of_different_kinds_never_meet():
    variants = {
        "plain": keys(),
        "adapter": keys(adapter="x"),
        "salt": keys(salt="x"),
        "epoch": keys(epoch=1),
        "both": keys(adapter="x", salt="x"),
        "other adapter": keys(adapter="y"),
        "image": keys(media=["x", None, None, None]),
        "image later": keys(media=[None, "x", None, None]),
        "block size": keys(size=8)[:4],
        "other seed": keys(keyer=Keyer(b"other")),
    }
    seen = [value[-1] for value in variants.values()]
    assert len(set(seen)) == len(seen)


def test_an_image_counts_from_its_block_on():
    plain, image = keys(), keys(media=[None, "digest", None, None])
    assert plain[0] == image[0] and not set(plain[1:]) & set(image)


def test_many_random_blocks_collide_nowhere():
    rng = np.random.default_rng(3)
    blocks = rng.integers(0, 4, (20_000, 16)).astype(np.uint32)  # few different tokens, many near-equal blocks
    unique = {tuple(b) for b in blocks.tolist()}
    assert len({keys(block)[0] for block in unique}) == len(unique)


def test_keys_are_the_same_in_every_process():
    program = (
        "import numpy as np; from kvrelay.core.contract.keys import Keyer;"
        "print(Keyer(b'seed').prompt_keys(np.arange(1, 65, dtype=np.uint32), 16, adapter='a', salt='s').tolist())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("0", "1")
    }
    assert outputs == {f"{keys(adapter='a', salt='s')}\n"}


def test_deep_prompts_extend_the_table_of_depth_factors_without_changing_it():
    deep = Keyer(b"seed").prompt_keys(np.ones(16 * 5_000, dtype=np.uint32), 16)
    shallow = Keyer(b"seed").prompt_keys(np.ones(16 * 10, dtype=np.uint32), 16)
    assert deep[:10].tolist() == shallow.tolist()


def test_an_impossible_block_size_is_refused():
    with pytest.raises(ValueError, match=r"block size 0 is outside 1\.\.4096 tokens"):
        keys(size=0)
