"""What a server that keeps whole prompts has left after a fork; the figures are those of llama.cpp's real server."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.index import whole_prompts
from kvrelay.core.index.residency import Residency
from kvrelay.core.index.whole_prompts import WholePrompts
from tests.core.index.worlds import KEYER, SIZE, keys

A_TO_J = list(range(10))


class Guess:
    def __init__(self) -> None:
        self.residency = Residency(KEYER)
        self.slot = self.residency.add_holder(SIZE)
        self.prompts = WholePrompts(self.residency, self.slot, max_blocks=1000, ttl_s=100.0)

    def serve(self, *chains: list[int]) -> None:
        for now, chain in enumerate(chains):
            self.prompts.served(float(now), keys(chain))
            self.residency.check()

    def depth(self, chain: list[int]) -> int:
        return int(self.residency.depths(keys(chain))[self.slot])


@pytest.fixture
def guess() -> Guess:
    return Guess()


@pytest.mark.covers("TP-16")
@pytest.mark.parametrize(
    ("common", "left"),
    [(9, 9), (7, 7), (5, 5), (4, 10), (1, 10), (0, 10)],
    ids=str,
)
def test_a_fork_takes_the_rest_unless_more_than_half_would_go(guess: Guess, common: int, left: int) -> None:
    guess.serve(A_TO_J, [*A_TO_J[:common], 100, 101, 102])
    assert guess.depth(A_TO_J) == left
    assert guess.depth([*A_TO_J[:common], 100, 101, 102]) == common + 3


@pytest.mark.covers("TP-16")
def test_what_shares_a_tenth_or_less_is_a_prompt_of_its_own(guess: Guess) -> None:
    guess.serve([1, 2], [1, *range(100, 109)])  # half of the old one would stay, but it is a tenth of the new one
    assert guess.depth([1, 2]) == 2
    guess.serve([3, 4], [3, *range(200, 208)])
    assert guess.depth([3, 4]) == 1


def test_a_prompt_that_goes_on_loses_nothing(guess: Guess) -> None:
    guess.serve(A_TO_J[:6], A_TO_J)
    assert guess.depth(A_TO_J) == 10
    assert len(guess.prompts) == 10


def test_a_prompt_cut_short_is_what_the_server_has_then(guess: Guess) -> None:
    guess.serve(A_TO_J, A_TO_J[:6])
    assert guess.depth(A_TO_J) == 6
    guess.serve(A_TO_J, A_TO_J)
    assert guess.depth(A_TO_J) == 10


def test_what_another_prompt_has_too_stays(guess: Guess) -> None:
    head = A_TO_J[:4]
    guess.serve([*head, 20, 21, 22, 23, 24, 25], [*head, 30, 31, 32])  # less than half stays: the first is put aside
    assert guess.depth([*head, 20, 21]) == 6
    guess.serve([*head, 30, 31, 40])
    assert guess.depth([*head, 30, 31, 32]) == 6
    assert guess.depth([*head, 20, 21]) == 6


def test_forgotten_and_corrected_prompts_overwrite_nothing(guess: Guess) -> None:
    guess.serve(A_TO_J)
    guess.prompts.corrected(keys(A_TO_J), actual_blocks=7)
    guess.serve([*A_TO_J[:6], 50])
    assert guess.depth(A_TO_J) == 7
    assert guess.prompts.expire(1000.0, 10_000) > 0
    assert len(guess.prompts) == 0 and guess.depth(A_TO_J) == 0


def test_an_emptied_one_is_of_the_same_kind(guess: Guess) -> None:
    guess.serve(A_TO_J)
    assert isinstance(guess.prompts.emptied(), WholePrompts) and len(guess.prompts.emptied()) == 0


def test_only_so_many_prompts_are_looked_through(guess: Guess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_prompts, "MAX_PROMPTS", 2)
    guess.serve(A_TO_J, [40, 41], [50, 51], [*A_TO_J[:9], 60])
    assert guess.depth(A_TO_J) == 10  # its blocks stay; that it was overwritten is no longer seen


CHAINS = st.lists(st.integers(0, 2), max_size=8).map(lambda tail: [9, *tail])


@given(st.lists(CHAINS, max_size=12))
def test_whatever_is_served_the_last_prompt_is_held_and_the_books_agree(chains: list[list[int]]) -> None:
    guess = Guess()
    for chain in chains:
        guess.serve(chain)
        assert guess.depth(chain) == len(chain)
    held = {tuple(chain[: n + 1]) for chain in chains for n in range(guess.depth(chain))}
    assert len(guess.prompts) == len(held)
