"""What conversations will still bring, told without session ids."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.load import growth as growing
from kvrelay.core.load.growth import COMPUTED_AGAIN, TO_COME, Growth
from kvrelay.core.model.events import WorkerDrained, WorkerResumed
from tests.core.index.worlds import keys
from tests.core.routing.rig import SIZE, Rig, text


def growth(slots: int = 2) -> Growth:
    made = Growth()
    for slot in range(slots):
        made.add_slot(slot)
    return made


def place(made: Growth, slot: int, chain: list[int], *, matched: int = 0, now: float = 0.0) -> bool:
    """Returns whether it was taken for the beginning of a conversation."""
    continues = made.continues(keys(chain), matched)
    made.placed(now, slot, keys(chain), matched_tokens=matched * 4, prefill_tokens=100, continues=continues)
    return continues is None


def expected(made, now, continues, *, reachable=(0, 0), prompt_tokens=1_000_000):
    """For slots 0 and 1, in both ways of working it out."""
    few = made.expected_tokens(now, [0, 1], continues, reachable=reachable, prompt_tokens=prompt_tokens)
    many = made.expected_tokens_of_many(
        now, np.array([0, 1]), continues, reachable=np.array(reachable, float), prompt_tokens=prompt_tokens
    )
    assert many.tolist() == pytest.approx(few)
    return few


def test_a_prompt_that_goes_on_where_another_ended_continues_it():
    made = growth()
    assert place(made, 0, [1, 2, 3])
    assert not place(made, 0, [1, 2, 3, 4, 5], matched=3)
    assert not place(made, 0, [1, 2, 3, 4, 5, 6, 7, 8], matched=7), "the answer lies between end and match"
    assert place(made, 0, [1, 2, 9], matched=2), "a shared head is not a conversation"
    assert not place(made, 0, [1, 2, 9], matched=3), "the same prompt once more"


prompts = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 60), st.integers(0, 60)), max_size=12)


@given(prompts)
def test_an_end_is_found_wherever_in_the_window_it_lies(asked):
    """A naive model: every end of the past, looked for in every block of the window."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growing, "_ANSWER_BLOCKS", 20)
        patch.setattr(growing, "_MOST_ENDS", 4)
        made, ends = growth(), []
        for family, blocks, matched in asked:
            matched = min(matched, blocks)
            chain = keys([family, *range(10, 10 + blocks - 1)])
            window = chain.tolist()[max(0, matched - 20) : matched + 1]
            goes_on = made.continues(chain, matched)
            assert (goes_on is not None) is any(end in window for end in ends)
            made.placed(0.0, 0, chain, matched_tokens=0, prefill_tokens=0, continues=goes_on)
            gone_on = [end for end in window if end in ends][-1:]  # the latest of them, and only once
            ends = [*(end for end in ends if end not in (chain.item(-1), *gone_on)), chain.item(-1)][-4:]


def test_where_prompts_fork_behind_one_that_ended_only_the_first_goes_on_with_it():
    made = growth()
    place(made, 0, [1])  # as short as the system prompt that everybody shares
    assert not place(made, 0, [1, 2, 3], matched=1)
    assert all(place(made, 0, [1, own, 3], matched=1) for own in range(10, 20))
    assert not place(made, 0, [1, 2, 3, 4], matched=3) and not place(made, 0, [1, 15, 3, 4], matched=3)


def test_every_conversation_counts_once_where_it_began():
    made = growth()
    for number in range(3):
        place(made, 0, [number, 1], matched=1)
        place(made, 0, [number, 1, 2], matched=2)
    assert expected(made, 0.0, None) == [TO_COME * 600.0, 0.0], "three of 200 tokens each, and none"
    place(made, 1, [7, 1], matched=1)
    assert expected(made, 0.0, None) == [pytest.approx(TO_COME * 2 * 700 / 4), 0.0], "only what is beyond the least"


def test_nobody_loses_more_by_it_than_computing_again_and_a_wait_of_one_prompt():
    """A worker that joins late would else get every new conversation until it had as many, however long its queue."""
    made = growth()
    for number in range(1_000):
        place(made, 0, [number, 1], matched=1)
    assert expected(made, 0.0, None) == [TO_COME * 100_000.0, 0.0]
    assert expected(made, 0.0, None, prompt_tokens=300) == [300.0, 0.0]
    assert expected(made, 0.0, None, prompt_tokens=300, reachable=(200, 0)) == [COMPUTED_AGAIN * 200 + 300.0, 0.0]
    assert expected(made, 0.0, None, prompt_tokens=300, reachable=(200, 200)) == [300.0, 0.0]


def test_the_first_of_a_family_says_nothing_of_what_one_of_them_brings():
    made = growth()
    place(made, 0, [1, 2, 3])
    assert expected(made, 0.0, None) == [0.0, 0.0], "a burst with one new prefix must stay together"


def test_it_fades_within_minutes_and_goes_with_the_slot():
    made = growth()
    place(made, 0, [1, 2], matched=1)
    fresh = expected(made, 0.0, None)[0]
    assert expected(made, 300.0, None)[0] == pytest.approx(fresh / 2)
    for hour in range(1, 5):  # the weights are brought down again and again
        place(made, 1, [hour, 2], matched=1, now=3600.0 * hour)
    assert expected(made, 4 * 3600.0, None) == [0.0, pytest.approx(TO_COME * 100.0, rel=0.01)]
    made.drop_slot(1)
    assert expected(made, 4 * 3600.0, None)[1] == 0.0


def test_a_conversation_that_moves_takes_its_weight_along_and_does_not_burden_its_own_next_turn():
    made = growth()
    place(made, 0, [1, 2], matched=1)
    place(made, 1, [5, 2], matched=1)
    moving = made.continues(keys([1, 2, 3]), 2)
    assert moving is not None and moving.slot == 0
    assert expected(made, 0.0, moving) == [0.0, TO_COME * 100.0], "elsewhere it would be one of two"
    assert not place(made, 1, [1, 2, 3], matched=1 + 1)
    assert expected(made, 0.0, None) == [0.0, pytest.approx(TO_COME * 2 * 300 / 2)]
    again = made.continues(keys([1, 2, 3, 4]), 3)
    assert again is not None and again.slot == 1


def test_a_conversation_whose_worker_was_lost_begins_anew():
    made = growth()
    place(made, 0, [1, 2], matched=1)
    made.drop_slot(0)
    assert made.continues(keys([1, 2, 3]), 2) is None


def test_a_conversation_is_recognised_on_workers_of_another_block_size():
    rig = Rig()
    sizes = {"a": SIZE, "b": 2 * SIZE}
    for name, size in sizes.items():
        rig.join(name, block_size_tokens=size)
    for name, size in sizes.items():
        first, second = text(size, blocks=8), np.concatenate([text(size, blocks=8), text(9, blocks=4)])
        rig.step(WorkerDrained("b" if name == "a" else "a"))
        assert rig.serve(first).chosen_worker == name
        rig.hold(name, first, size=size)
        begun = sum(rig.router._ledger.growth._begun)
        rig.serve(second)
        assert sum(rig.router._ledger.growth._begun) == pytest.approx(begun, rel=0.01)
        rig.step(WorkerResumed("b" if name == "a" else "a"))


def family(number: int, session: int, turns: int) -> np.ndarray:
    """A system prompt of ten blocks, then one block per turn of the session's own."""
    own = [text(1_000 * number + 10 * session + turn) for turn in range(turns + 1)]
    return np.concatenate([text(number, blocks=10), *own])


@pytest.mark.parametrize(
    "order", [[0, 1, 2, 3] * 3, [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3], [3, 1, 1, 2, 0, 3, 2, 0, 1, 3, 2, 0]]
)
def test_families_of_conversations_are_placed_whole_and_evenly(order):
    rig = Rig()
    rig.join("a", "b")
    homes: list[str] = []
    for session, number in enumerate(order):
        for turn in range(4):
            prompt = family(number, session, turn)
            receipt = rig.serve(prompt)
            rig.hold(receipt.chosen_worker, prompt)
        homes.append(receipt.chosen_worker)
    counts = [homes.count(name) for name in "ab"]
    assert max(counts) <= 7, homes
    split = sum(len({home for home, its in zip(homes, order, strict=True) if its == number}) > 1 for number in range(4))
    assert split <= 2, "a system prompt is computed twice only where the fleet would be uneven otherwise"
