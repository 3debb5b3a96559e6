"""Booked load: never negative, zero when idle, foreign load beside it and not twice."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvrelay.core.load.ledger import KINDS, Ledger

SLOTS = 3


def new_ledger(slots=SLOTS):
    ledger = Ledger(initial_prefill_tokens_per_s=1_000.0)
    for slot in range(slots):
        ledger.add_slot(slot)
    return ledger


def row(ledger, slot=0):
    return ledger.table()[: len(KINDS), slot].tolist()


@pytest.mark.covers("S01")
def test_a_request_moves_from_prefill_to_decode_to_nothing():
    ledger = new_ledger()
    ledger.book(0.0, "r", 0, prefill_tokens=100, decode_blocks=7)
    assert row(ledger) == [1, 1, 100, 0, 0]
    ledger.first_token(1.0, "r")
    ledger.first_token(1.5, "r")
    assert row(ledger) == [1, 0, 0, 7, 0]
    assert ledger.settle(2.0, "r") and not ledger.settle(2.0, "r")
    assert row(ledger) == [0, 0, 0, 0, 0]


def test_an_end_before_the_first_token_takes_the_prefill_back():
    ledger = new_ledger()
    ledger.book(0.0, "r", 0, prefill_tokens=100, decode_blocks=7)
    ledger.settle(0.1, "r")
    assert row(ledger) == [0, 0, 0, 0, 0]


@pytest.mark.covers("S15")
def test_what_ends_on_a_dropped_slot_changes_nothing():
    ledger = new_ledger()
    ledger.book(0.0, "r", 0, prefill_tokens=100, decode_blocks=7)
    ledger.drop_slot(0)
    ledger.add_slot(0)
    ledger.first_token(1.0, "r")
    assert not ledger.settle(1.0, "r") and row(ledger) == [0, 0, 0, 0, 0]


@pytest.mark.covers("S03")
def test_only_what_our_bookings_cannot_explain_is_foreign():
    ledger = new_ledger()
    ledger.book(0.0, "r", 0, prefill_tokens=1, decode_blocks=1)
    ledger.report(0, running=1, waiting=2, kv_usage_ratio=0.5)
    assert ledger.slots[0].foreign_requests == 2
    ledger.book(0.0, "s", 0, prefill_tokens=1, decode_blocks=1)
    assert ledger.slots[0].foreign_requests == 2, "a dispatch after the report is ours and not theirs"
    ledger.report(0, running=2, waiting=0, kv_usage_ratio=0.5)
    assert ledger.slots[0].foreign_requests == 0
    ledger.report(0, running=0, waiting=0, kv_usage_ratio=0.5)
    assert ledger.slots[0].foreign_requests == 0, "a gauge that lags behind our bookings is not negative load"


def test_a_missing_gauge_is_unknown_and_not_zero():
    ledger = new_ledger()
    ledger.report(0, running=3, waiting=0, kv_usage_ratio=None)
    ledger.report(0, running=None, waiting=None, kv_usage_ratio=None)
    assert ledger.slots[0].foreign_requests == 3 and ledger.slots[0].reported == (None, None, None)


def test_recent_work_fades_and_compares():
    ledger = new_ledger()
    ledger.book(0.0, "a", 0, prefill_tokens=100, decode_blocks=1)
    ledger.book(60.0, "b", 1, prefill_tokens=100, decode_blocks=1)
    assert ledger.slots[1].recent_tokens == pytest.approx(2 * ledger.slots[0].recent_tokens)
    ledger.book(1_000.0, "c", 2, prefill_tokens=1, decode_blocks=1)
    assert ledger.slots[0].recent_tokens < ledger.slots[1].recent_tokens < ledger.slots[2].recent_tokens < 10


class NaiveLedger(RuleBasedStateMachine):
    """A dict of requests, summed up afresh for every question."""

    def __init__(self):
        super().__init__()
        self.ledger = new_ledger()
        self.requests: dict[str, list] = {}
        self.now = 0.0
        self.number = 0

    @rule(slot=st.integers(0, SLOTS - 1), tokens=st.integers(0, 500), blocks=st.integers(0, 9), wait=st.floats(0, 9))
    def book(self, slot, tokens, blocks, wait):
        self.now += wait
        self.number += 1
        self.ledger.book(self.now, str(self.number), slot, prefill_tokens=tokens, decode_blocks=blocks)
        self.requests[str(self.number)] = [slot, tokens, blocks, True]

    @rule(data=st.data())
    def first_token(self, data):
        request = str(data.draw(st.integers(0, self.number)))
        self.ledger.first_token(self.now, request)
        if request in self.requests:
            self.requests[request][3] = False

    @rule(data=st.data())
    def settle(self, data):
        request = str(data.draw(st.integers(0, self.number)))
        assert self.ledger.settle(self.now, request) == (self.requests.pop(request, None) is not None)

    @rule(slot=st.integers(0, SLOTS - 1))
    def replace_worker(self, slot):
        self.ledger.drop_slot(slot)
        self.ledger.add_slot(slot)
        self.requests = {r: entry for r, entry in self.requests.items() if entry[0] != slot}

    @rule(slot=st.integers(0, SLOTS - 1), running=st.integers(0, 5), waiting=st.integers(0, 5))
    def report(self, slot, running, waiting):
        self.ledger.report(slot, running=running, waiting=waiting, kv_usage_ratio=None)
        ours = sum(entry[0] == slot for entry in self.requests.values())
        assert self.ledger.slots[slot].foreign_requests == max(0, running + waiting - ours)

    @invariant()
    def agrees(self):
        self.ledger.check()
        for slot in range(SLOTS):
            mine = [entry for entry in self.requests.values() if entry[0] == slot]
            assert row(self.ledger, slot)[:4] == [
                len(mine),
                sum(prefilling for *_, prefilling in mine),
                sum(tokens for _, tokens, _, prefilling in mine if prefilling),
                sum(blocks for _, _, blocks, prefilling in mine if not prefilling),
            ]


NaiveLedger.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


class TestAgainstANaiveModel(NaiveLedger.TestCase):
    pass
