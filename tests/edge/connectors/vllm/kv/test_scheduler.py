"""What is loaded, what is saved, and what is remembered of it, without an engine."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from kvrelay.edge.connectors.vllm.kv.chain import Chain
from kvrelay.edge.connectors.vllm.kv.orders import StepReports
from kvrelay.edge.connectors.vllm.kv.records import Records
from kvrelay.edge.connectors.vllm.kv.scheduler import Scheduled, Unidentified
from kvrelay.edge.connectors.vllm.kv.switch import Switch
from tests.edge.connectors.vllm.kv.engine import (
    BLOCK,
    CHUNK,
    FakeStore,
    half,
    matched,
    namespace_of,
    report,
    request,
    schedule,
    step,
)


def stored(store: FakeStore, tokens: int, chunks: int, salt: str | None = None) -> None:
    ids = request(tokens).prompt_token_ids
    store.there |= set(Chain(namespace_of(salt, None), CHUNK).keys(ids, chunks))


def test_a_cold_prompt_is_saved_chunk_by_chunk_as_it_is_computed() -> None:
    connector, asked = half(FakeStore()), request(30)
    assert matched(connector, asked) == 0
    assert schedule(connector, asked) == ()
    assert step(connector, asked, computed=0, new=20) == [(0, (10, 11)), (8, (12, 13))]
    assert step(connector, asked, computed=20, new=10) == [(16, (14, 15))]
    record = connector.finished(asked)
    assert record is not None and (record.outcome, record.reason, record.cached_tokens) == ("none", "absent", 0)


@pytest.mark.covers("TR-12")
@pytest.mark.parametrize(
    ("tokens", "chunks", "local", "expected"),
    [
        (CHUNK - 1, 1, 0, 0),  # no whole chunk
        (CHUNK, 1, 0, CHUNK - BLOCK),  # the last token is always computed, and blocks are whole
        (CHUNK + 1, 1, 0, CHUNK),
        (30, 3, 0, 24),
        (30, 2, 0, 16),
        (30, 3, 12, 12),  # one block of the second chunk is here already
        (30, 3, 24, 0),
        (30, 0, 0, 0),
    ],
)
def test_whole_blocks_beyond_what_is_here_are_matched(tokens: int, chunks: int, local: int, expected: int) -> None:
    store = FakeStore()
    stored(store, tokens, chunks)
    assert matched(half(store), request(tokens), local) == expected


def test_a_load_names_chunks_and_the_blocks_that_are_wanted_of_them() -> None:
    store = FakeStore()
    stored(store, 30, 3)
    connector, asked = half(store), request(30)
    external = matched(connector, asked, 12)
    (load,) = schedule(connector, asked, local=12, external=external)
    assert [(chunk.first_token, chunk.block_ids) for chunk in load.chunks] == [(8, (None, 13)), (16, (14, 15))]
    assert all(chunk.places == (0,) for chunk in load.chunks)
    report(connector, asked, 2)
    assert step(connector, asked, computed=24, new=6) == []  # all of it is in the store
    record = connector.finished(asked)
    assert record is not None
    assert (record.outcome, record.local_tokens, record.planned_tokens, record.loaded_tokens) == ("hit", 12, 12, 12)
    assert (record.cached_tokens, record.bytes_read) == (24, 128)


@pytest.mark.covers("CN-06")
def test_a_load_that_failed_is_not_tried_again_and_what_is_broken_is_written_anew() -> None:
    store = FakeStore()
    stored(store, 30, 3)
    connector, asked = half(store), request(30)
    schedule(connector, asked, external=matched(connector, asked))
    report(connector, asked, 0, "corrupt")
    assert [connector.matched(asked, 0) for _ in range(3)] == [0, 0, 0]
    schedule(connector, asked)
    assert step(connector, asked, computed=0, new=30) == [(0, (10, 11)), (8, (12, 13)), (16, (14, 15))]
    record = connector.finished(asked)
    assert record is not None
    assert (record.outcome, record.planned_tokens, record.loaded_tokens, record.cached_tokens) == ("corrupt", 24, 0, 0)


def test_of_a_load_that_failed_on_the_way_what_came_before_is_kept() -> None:
    store = FakeStore()
    stored(store, 30, 3)
    connector, asked = half(store), request(30)
    schedule(connector, asked, external=matched(connector, asked))
    report(connector, asked, 1, "miss")
    assert step(connector, asked, computed=8, new=22) == [(8, (12, 13)), (16, (14, 15))]
    record = connector.finished(asked)
    assert record is not None and (record.outcome, record.loaded_tokens, record.planned_tokens) == ("miss", 8, 24)
    assert record.tokens_by_scope == {"engine": 0, "cluster": 8}


def test_a_slow_lookup_holds_nobody_up_and_is_given_up_at_its_deadline() -> None:
    store = FakeStore()
    store.slow_s = 0.2
    stored(store, 30, 3)
    now = [0.0]
    connector, asked = half(store, lookup_deadline_ms=50.0, clock=lambda: now[0]), request(30)
    connector.arrived(asked)
    began = time.monotonic()
    assert connector.matched(asked, 0) is None
    now[0] = 0.049
    assert connector.matched(asked, 0) is None
    now[0] = 0.051
    assert connector.matched(asked, 0) == 0
    assert time.monotonic() - began < 0.1, "it waited"
    time.sleep(0.3)
    assert connector.matched(asked, 0) == 0  # too late is too late, or a re-match could follow a computed prefix
    record = connector.finished(asked)
    assert record is not None and record.reason == "lookup_timeout"


@pytest.mark.covers("CN-04")
def test_a_consumer_never_saves_and_a_producer_never_loads() -> None:
    store = FakeStore()
    stored(store, 30, 3)
    producer, asked = half(store, loads=False), request(30)
    assert matched(producer, asked) == 0
    schedule(producer, asked)
    assert len(step(producer, asked, computed=0, new=30)) == 3
    consumer, asked = half(store, saves=False), request(30, name="other")
    assert matched(consumer, asked) == 24
    schedule(consumer, asked, external=24)
    assert step(consumer, asked, computed=24, new=6) == []


@pytest.mark.covers("S34")
def test_a_salt_is_a_world_of_its_own() -> None:
    store = FakeStore()
    stored(store, 30, 3, salt="a")
    assert [matched(half(store), request(30, salt=salt)) for salt in ("a", "b", None)] == [24, 0, 0]


def test_what_cannot_be_named_is_neither_loaded_nor_saved() -> None:
    store = FakeStore()
    stored(store, 30, 3)

    def pending(salt: str | None, adapter: str | None) -> None:
        raise Unidentified("contract_pending")

    for connector, asked, reason in (
        (half(store, namespace_of=pending), request(30), "contract_pending"),
        (half(store), request(30, prompt_embeds=object()), "no_token_ids"),
        (half(store), request(30, mm_features=[SimpleNamespace(mm_hash=None, identifier="")]), "no_token_ids"),
    ):
        assert matched(connector, asked) == 0
        schedule(connector, asked)
        assert step(connector, asked, computed=0, new=30) == []
        record = connector.finished(asked)
        assert record is not None and record.reason == reason


def test_a_mistake_in_a_lookup_or_a_save_stays_with_its_request_and_is_counted() -> None:
    store, records = FakeStore(), Records()
    stored(store, 30, 3)

    def mistaken(salt: str | None, adapter: str | None) -> None:
        raise KeyError("a mistake")

    connector, asked = half(store, namespace_of=mistaken, records=records), request(30)
    assert matched(connector, asked) == 0
    record = connector.finished(asked)
    assert record is not None and record.reason == "fault"
    assert records.totals()["faults"] == 1

    connector, good, bad = half(store, records=records), request(30, name="good"), request(30, name="bad")
    for each in (good, bad):
        matched(connector, each)
    connector.allocated(good, range(10, 18), 24)
    bad.num_prompt_tokens = None
    orders = connector.orders([Scheduled("bad", 0, 30, tuple(range(8)), True)])
    assert len(orders.loads) == 1 and orders.saves == ()
    assert records.totals()["faults"] == 2


@pytest.mark.covers("TU-06")
def test_what_is_slower_than_computing_is_not_loaded() -> None:
    store = FakeStore()
    store.worthwhile = False
    stored(store, 30, 3)
    connector, asked = half(store), request(30)
    assert matched(connector, asked) == 0
    record = connector.finished(asked)
    assert record is not None and record.reason == "slower_than_recompute"
    assert (record.predicted_fetch_ms, record.predicted_recompute_ms) == (1.0, 2.0)


def test_generated_tokens_are_saved_once_their_ids_are_known() -> None:
    connector, asked = half(FakeStore()), request(14)
    matched(connector, asked)
    schedule(connector, asked)
    assert step(connector, asked, computed=0, new=14) == [(0, (10, 11))]
    saves = []
    for computed in range(14, 18):
        asked.all_token_ids.append(1)
        saves.append(step(connector, asked, computed=computed, new=1))
    assert saves == [[], [(8, (12, 13))], [], []]
    reticent, asked = half(FakeStore(), save_generated=False), request(14, name="other")
    matched(reticent, asked)
    schedule(reticent, asked)
    asked.all_token_ids += [1] * 10
    assert step(reticent, asked, computed=0, new=20) == [(0, (10, 11))]


def test_a_chunk_is_saved_once_and_again_only_when_it_was_lost() -> None:
    now = [0.0]
    connector = half(FakeStore(), clock=lambda: now[0])
    for name, at, expected in (("a", 0.0, 1), ("b", 29.0, 0), ("evicted since", 31.0, 1), ("d", 32.0, 0)):
        now[0] = at
        asked = request(9, name=name)
        matched(connector, asked)
        schedule(connector, asked)
        saves = connector.orders([]).saves
        assert len(step(connector, asked, computed=0, new=9)) == expected, saves
        connector.finished(asked)
    key = Chain(namespace_of(None, None), CHUNK).keys(asked.prompt_token_ids, 1)[0]
    connector.reported(StepReports(saves={"unavailable": 1}, unsaved=(key,)))
    asked = request(9, name="c")
    matched(connector, asked)
    schedule(connector, asked)
    assert len(step(connector, asked, computed=0, new=9)) == 1


def test_a_request_that_ends_during_its_load_leaves_its_record_afterwards() -> None:
    store, records = FakeStore(), Records()
    stored(store, 30, 3)
    connector, asked = half(store, records=records), request(30)
    schedule(connector, asked, external=matched(connector, asked))
    assert connector.finished(asked) is None
    assert records.totals() == {}
    report(connector, asked, 3)
    assert records.totals()["loaded_tokens"] == 24
    assert records.find("r") is not None


def test_counters_are_the_sums_of_the_records() -> None:
    store, records = FakeStore(), Records()
    stored(store, 30, 3)
    connector = half(store, records=records)
    for name, chunks, outcome in (("a", 3, "hit"), ("b", 1, "corrupt"), ("c", 0, "timeout")):
        asked = request(30, name=name)
        schedule(connector, asked, external=matched(connector, asked))
        report(connector, asked, chunks, outcome)
        connector.finished(asked)
    found = [records.find(name) for name in "abc"]
    totals = records.totals()
    assert totals["loaded_tokens"] == sum(r.loaded_tokens for r in found if r is not None) == 24 + 8
    assert totals["read_bytes"] == sum(r.bytes_read for r in found if r is not None) == 4 * 64
    assert [totals[f"loads_{outcome}"] for outcome in ("hit", "corrupt", "timeout")] == [1, 1, 1]


def test_prefill_and_fetches_teach_the_break_even() -> None:
    store = FakeStore()
    connector, asked = half(store), request(30)
    matched(connector, asked)
    schedule(connector, asked)
    for computed, new in ((0, 16), (16, 14), (30, 1), (31, 1)):
        step(connector, asked, computed=computed, new=new)
    assert store.prefills == [30]


def test_what_another_request_is_loading_is_waited_for_and_not_read_twice() -> None:
    store = FakeStore()
    stored(store, 30, 3)
    connector = half(store)
    first, second = request(30), request(30, name="cmpl-s-0-0123abcd")
    schedule(connector, first, external=matched(connector, first))
    assert matched(connector, request(30, name="cmpl-t-0-0123abcd", salt="other")) == 0, (
        "another salt is another prompt"
    )
    connector.arrived(second)
    connector._tracked[second.request_id].lookup.result()  # type: ignore[union-attr]
    assert [connector.matched(second, 0) for _ in range(3)] == [None] * 3
    report(connector, first, 3)
    assert connector.matched(second, 24) == 0, "by now the engine itself has it"


def test_what_another_request_could_not_load_is_tried_by_the_next() -> None:
    store = FakeStore()
    stored(store, 30, 3)
    connector = half(store)
    first, second = request(30), request(30, name="cmpl-s-0-0123abcd")
    schedule(connector, first, external=matched(connector, first))
    report(connector, first, 0, "timeout")
    assert matched(connector, second) == 24


@pytest.mark.covers("DR-09")
def test_by_the_policy_fail_a_store_that_does_not_answer_is_an_error_and_no_miss() -> None:
    """The engine ends a request whose load failed; so one has to be tried, even of what nobody can have promised."""
    store = FakeStore()
    store.owed = True
    connector, asked = half(store), request(30)
    external = matched(connector, asked)
    assert external == 24
    (load,) = schedule(connector, asked, external=external)
    assert [chunk.places for chunk in load.chunks] == [()] * 3
    report(connector, asked, 0, "absent")
    assert matched(connector, asked) == 0


def test_an_operators_switch_stops_loads_and_saves_at_once() -> None:
    store, switch = FakeStore(), Switch()
    stored(store, 30, 2)
    connector, asked = half(store, switch=switch), request(30)
    assert matched(connector, asked) == 16
    switch.throw(False)
    assert matched(connector, asked) == 0, "what was looked up before is not loaded after"
    schedule(connector, asked)
    assert step(connector, asked, computed=0, new=30) == []
    record = connector.finished(asked)
    assert record is not None and (record.outcome, record.reason) == ("none", "switched_off")
    later = request(30, name="cmpl-later-0-0123abcd")
    assert matched(connector, later) == 0
    switch.throw(True)
    assert matched(connector, request(30, name="cmpl-again-0-0123abcd")) == 16
