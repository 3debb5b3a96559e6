"""Learned prefill rates converge to what a worker really does, and a hanging worker never looks idle."""

from __future__ import annotations

import numpy as np
import pytest

from kvrelay.core.load.ledger import PREFILL, Ledger
from kvrelay.core.load.prefill_rate import PrefillRates, remaining_tokens


def serve(ledger, slot, *, rate, prompts, start=0.0, together=1):
    """A worker that prefills `together` prompts at a time at `rate` tokens per second, one group after the other."""
    now = start
    for group in range(0, len(prompts), together):
        batch = prompts[group : group + together]
        for i, tokens in enumerate(batch):
            ledger.book(now, f"{slot}.{group}.{i}", slot, prefill_tokens=tokens, decode_blocks=1)
        now += sum(batch) / rate
        for i in range(len(batch)):
            ledger.first_token(now, f"{slot}.{group}.{i}")
            ledger.settle(now, f"{slot}.{group}.{i}")
        now += 3.0  # idle time must not count
    return now


@pytest.mark.parametrize("together", [1, 4])
def test_the_rate_is_learned_with_and_without_batching(together):
    ledger = Ledger(initial_prefill_tokens_per_s=1_000.0)
    ledger.add_slot(0)
    serve(ledger, 0, rate=5_000.0, prompts=[800, 1_200, 3_000, 500] * 10, together=together)
    assert ledger.rates.of(0) == pytest.approx(5_000.0, rel=0.25 if together > 1 else 0.05)


def test_a_change_of_speed_is_followed():
    ledger = Ledger(initial_prefill_tokens_per_s=1_000.0)
    ledger.add_slot(0)
    now = serve(ledger, 0, rate=5_000.0, prompts=[1_000] * 30)
    for i in range(30):
        ledger.book(now, f"s{i}", 0, prefill_tokens=1_000, decode_blocks=1)
        now += 1.0
        ledger.first_token(now, f"s{i}")
        ledger.settle(now, f"s{i}")
    assert ledger.rates.of(0) == pytest.approx(1_000.0, rel=0.2)


def test_a_moment_of_standstill_is_no_change_of_speed():
    """A gateway that was suspended sees one first token seconds late, at one worker only."""
    ledger = Ledger(initial_prefill_tokens_per_s=1_000.0)
    for slot in range(2):
        ledger.add_slot(slot)
        now = serve(ledger, slot, rate=5_000.0, prompts=[500] * 10)
    ledger.book(now, "across", 0, prefill_tokens=500, decode_blocks=1)
    ledger.first_token(now + 2.5, "across")
    assert ledger.rates.of(0) == ledger.rates.of(1)
    for again in range(5):
        ledger.book(now + 3.0 + again, f"slow{again}", 0, prefill_tokens=500, decode_blocks=1)
        ledger.first_token(now + 3.9 + again, f"slow{again}")
    assert ledger.rates.of(0) < 0.5 * ledger.rates.of(1), "who is slow again and again is slow"


def test_nearly_cached_prompts_teach_nothing():
    ledger = Ledger(initial_prefill_tokens_per_s=1_000.0)
    ledger.add_slot(0)
    serve(ledger, 0, rate=10.0, prompts=[16] * 10)
    assert ledger.rates.of(0) == 1_000.0 and ledger.rates.samples(0) == 0


def test_prompts_that_were_nearly_cached_do_not_make_those_behind_them_look_quick():
    """One queue, worked off at 2,000 tokens per second; a long prompt follows right behind a short one."""
    ledger = Ledger(initial_prefill_tokens_per_s=1_000.0)
    ledger.add_slot(0)
    sizes = [80, 80, 80, 320] * 20
    for number, tokens in enumerate(sizes):
        ledger.book(0.0, str(number), 0, prefill_tokens=tokens, decode_blocks=1)
    now = 0.0
    for number, tokens in enumerate(sizes):
        now += tokens / 2_000.0
        ledger.first_token(now, str(number))
    assert ledger.rates.of(0) == pytest.approx(2_000.0, rel=0.01)


def test_what_was_not_computed_after_all_teaches_nothing():
    """Claimed was nothing, as no event had come yet; the engine had nearly all of it."""
    ledger = Ledger(initial_prefill_tokens_per_s=1_000.0)
    ledger.add_slot(0)
    now = serve(ledger, 0, rate=2_000.0, prompts=[500] * 10)
    ledger.book(now, "surprise", 0, prefill_tokens=1_680, decode_blocks=1)
    ledger.first_token(now + 0.04, "surprise")
    assert ledger.rates.learned(0) > 2_600.0
    ledger.settle(now + 0.1, "surprise", computed_tokens=80)
    assert ledger.rates.learned(0) == pytest.approx(2_000.0, rel=0.01)


def test_of_a_single_sample_nothing_is_taken_back():
    ledger = Ledger(initial_prefill_tokens_per_s=1_000.0)
    ledger.add_slot(0)
    ledger.book(0.0, "only", 0, prefill_tokens=500, decode_blocks=1)
    ledger.first_token(0.25, "only")
    ledger.settle(0.5, "only", computed_tokens=0)
    assert ledger.rates.learned(0) == 2_000.0


def test_a_newcomer_starts_with_what_the_others_taught():
    ledger = Ledger(initial_prefill_tokens_per_s=1_000.0)
    ledger.add_slot(0)
    serve(ledger, 0, rate=5_000.0, prompts=[1_000] * 10)
    ledger.add_slot(1)
    assert ledger.rates.of(1) == pytest.approx(5_000.0, rel=0.05)


def test_presumed_progress_is_bounded_and_a_worker_that_stands_still_gets_worse_by_the_second():
    ledger = Ledger(initial_prefill_tokens_per_s=1_000.0)
    ledger.add_slot(0)
    ledger.book(0.0, "r", 0, prefill_tokens=2_000, decode_blocks=1)

    def remaining(now):
        backlog, since = ledger.table()[PREFILL], ledger.rates.working_since()
        one_by_one = ledger.rates.remaining(now, 0, backlog[0])
        assert remaining_tokens(backlog, np.array([1_000.0]), now - since).tolist() == [one_by_one]
        return one_by_one

    assert remaining(0.0) == 2_000 and remaining(1.0) == 1_000
    assert remaining(1.8) == remaining(2.4) == pytest.approx(400), "who is a little late keeps a fifth of its backlog"
    assert remaining(5.0) == 3_000, "and will take as long again as it is late already"


def test_a_worker_without_a_backlog_stands_still_for_good_reason():
    idle_for_s = np.array([0.0, 1e6])
    assert remaining_tokens(np.zeros(2), np.full(2, 1_000.0), idle_for_s).tolist() == [0.0, 0.0]


def test_equal_machines_are_taken_for_equal_and_others_are_not():
    rates = PrefillRates(initial_tokens_per_s=8_000.0)
    for slot in range(3):
        rates.add_slot(slot)
    assert rates.of(0) == rates.of(2) == 8_000.0
    for slot, tokens_per_s in ((0, 1_000.0), (1, 1_300.0)):
        rates.backlog_grew(0.0, slot, was_empty=True)
        rates.prefill_done(1.0, slot, int(tokens_per_s))
    assert [rates.of(slot) for slot in range(3)] == [1_150.0] * 3, "as all the others, those unknown included"
    assert [rates.learned(slot) for slot in range(2)] == [1_000.0, 1_300.0]
    rates.backlog_grew(2.0, 2, was_empty=True)
    rates.prefill_done(3.0, 2, 4_000)
    assert rates.of(2) == 4_000.0 and rates.of(0) == 1_000.0, "they are two kinds of machines"
    assert rates.expected().tolist() == [rates.of(slot) for slot in range(3)]
    rates.add_slot(2)
    assert rates.of(2) == 1_150.0, "another worker at that place starts anew"
