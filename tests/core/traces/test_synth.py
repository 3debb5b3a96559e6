from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.traces.synth import MAX_BLOCK_IDS, PromptSynth
from kvrelay.core.traces.trace import SESSION_SCOPE, Session, Trace, Turn


def trace_of(*sessions: tuple[str, list[list[int]]], tail_tokens: int = 0) -> Trace:
    made = tuple(
        Session(
            f"{scope}-{number}",
            scope,
            tuple(Turn(0.0, 0.0, tuple(ids), len(ids) * 64 + tail_tokens, 8) for ids in turns),
        )
        for number, (scope, turns) in enumerate(sessions)
    )
    return Trace(64, SESSION_SCOPE, made)


@pytest.mark.covers("BM-13")
def test_same_seed_gives_the_same_bytes_and_another_seed_others() -> None:
    trace = trace_of(("a", [[1, 2, 3]]))
    prompts = [
        PromptSynth.of(trace, seed=seed, block_tokens=16).prompt(trace, trace.sessions[0], 0).tobytes()
        for seed in (7, 7, 8)
    ]

    assert prompts[0] == prompts[1]
    assert prompts[0] != prompts[2]
    # Pinned, so that a change of the recipe (which would make old manifests irreproducible) cannot go unnoticed.
    first = np.frombuffer(prompts[0], dtype=np.uint32)[:6]
    assert first.tolist() == [17853, 15434, 3827, 10658, 24904, 22163]


@pytest.mark.covers("BM-13")
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, MAX_BLOCK_IDS - 1)), min_size=1, max_size=40, unique=True
    ),
    st.integers(0, 2**32),
    st.sampled_from([4, 16, 64]),
)
def test_two_blocks_are_equal_exactly_when_scope_and_id_are(
    names: list[tuple[str, int]], seed: int, block_tokens: int
) -> None:
    trace = trace_of(*((scope, [[1]]) for scope in "abc"))
    synth = PromptSynth.of(trace, seed=seed, block_tokens=block_tokens)

    blocks = [synth.blocks(scope, [block_id])[0].tobytes() for scope, block_id in names]
    again = [synth.blocks(scope, [block_id])[0].tobytes() for scope, block_id in names]

    assert blocks == again
    assert len(set(blocks)) == len(names)


def test_neighbouring_ids_differ_even_where_only_the_digits_can_tell() -> None:
    trace = trace_of(("a", [[1]]))
    synth = PromptSynth.of(trace, seed=1, block_tokens=4)

    blocks = synth.blocks("a", list(range(50_000)))

    assert len(np.unique(blocks, axis=0)) == 50_000


def test_prompt_is_its_blocks_then_a_tail_shared_with_nobody() -> None:
    trace = trace_of(("a", [[1, 2], [1, 2]]), ("b", [[1, 2]]), tail_tokens=32)
    synth = PromptSynth.of(trace, seed=1, block_tokens=16)

    first, second = (synth.prompt(trace, trace.sessions[0], turn) for turn in (0, 1))
    foreign = synth.prompt(trace, trace.sessions[1], 0)

    assert first.size == second.size == 2 * 16 + 8
    assert first.dtype == np.uint32
    assert (first[:32] == second[:32]).all()
    assert (first[32:] != second[32:]).any()
    assert (first[:16] != foreign[:16]).any()


def test_partial_last_block_is_cut_to_the_input_length() -> None:
    trace = Trace(64, SESSION_SCOPE, (Session("s", "s", (Turn(0, 0, (1, 2), 100, 1),)),))
    synth = PromptSynth.of(trace, seed=1, block_tokens=64)

    assert synth.prompt(trace, trace.sessions[0], 0).size == 100


def test_unrelated_prompts_share_no_block_with_the_trace() -> None:
    trace = trace_of(("a", [list(range(500))]))
    synth = PromptSynth.of(trace, seed=1, block_tokens=4)

    assert not set(synth.unrelated("primer", 4000).tolist()) & set(synth.prompt(trace, trace.sessions[0], 0).tolist())


@pytest.mark.parametrize("block_id", [MAX_BLOCK_IDS, 2**40])
def test_id_beyond_the_bound_is_refused(block_id: int) -> None:
    synth = PromptSynth.of(trace_of(("a", [[1]])), seed=1, block_tokens=16)
    with pytest.raises(ValueError, match="block id"):
        synth.blocks("a", [block_id])
