"""The engine through its public `step`: what vLLM does, event for event."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.core.contract.keys import Keyer
from kvrelay.core.engine.engine import (
    Aborted,
    Admitted,
    CacheResetAnswered,
    CacheResetAsked,
    CorruptionDone,
    EngineEffect,
    Finished,
    PayloadsCorrupted,
    PublishBatch,
    StepEnded,
    StepStarted,
    Submitted,
    TokenMade,
)
from kvrelay.core.model.events import BlocksCleared, BlocksRemoved, BlocksStored
from tests.core.engine.engines import BLOCK, Drive, make_engine, request, tokens


def stored(batch: PublishBatch) -> list[BlocksStored]:
    return [event for event in batch.events if isinstance(event, BlocksStored)]


def removed(batch: PublishBatch) -> list[BlocksRemoved]:
    return [event for event in batch.events if isinstance(event, BlocksRemoved)]


# --- one request, effect by effect -------------------------------------------------------------------------------


def test_one_request_is_a_prefill_step_and_then_one_step_per_token() -> None:
    drive = Drive(make_engine())
    assert drive.send(Submitted(request("r", tokens(10), 2))) == (
        Admitted(request_id="r", queue_s=0.0, prompt_tokens=10, cached_tokens=0, wrong_reuse_blocks=0),
        StepStarted(step=1, ends_at_s=0.011, prefill_tokens=10, decode_requests=0),
    )
    batch, first, next_step = drive.end_step()
    assert isinstance(batch, PublishBatch) and batch.seq == 0
    assert isinstance(first, TokenMade) and first.position == 0
    assert next_step == StepStarted(step=2, ends_at_s=pytest.approx(0.022), prefill_tokens=0, decode_requests=1)
    second, end = drive.end_step()
    assert isinstance(second, TokenMade) and second.position == 1
    assert isinstance(end, Finished)
    assert (end.reason, end.prompt_tokens, end.output_tokens, end.cached_tokens) == ("length", 10, 2, 0)
    assert (end.queue_s, end.prefill_s, end.decode_s) == (0.0, pytest.approx(0.011), pytest.approx(0.011))


def test_the_batch_names_the_blocks_chained_with_their_tokens() -> None:
    drive = Drive(make_engine(hash_seed="7"))
    drive.complete(request("r", tokens(10)))
    (batch,) = drive.take_batches()
    (event,) = stored(batch)
    assert event.hashes == tuple(Keyer(b"7").prompt_keys(tokens(10), BLOCK).tolist())
    assert event.parent is None and event.block_size_tokens == BLOCK
    assert event.token_ids is not None and event.token_ids.tolist() == list(range(8))
    assert all(0 <= name < 2**64 for name in event.hashes)


def test_a_hit_emits_nothing_and_leaves_one_token_to_compute() -> None:
    drive = Drive(make_engine())
    drive.complete(request("cold", tokens(10)))
    drive.take_batches()
    warm = drive.complete(request("warm", tokens(10)))
    assert warm.cached_tokens == 8
    assert drive.take_batches() == []


@pytest.mark.covers("S10")
def test_a_full_hit_of_whole_blocks_computes_its_last_block_again_and_stores_a_second_copy() -> None:
    drive = Drive(make_engine())
    drive.complete(request("cold", tokens(8)))
    (first,) = drive.take_batches()
    warm = drive.complete(request("warm", tokens(8)))
    assert warm.cached_tokens == 4, "8 tokens are held, but the last one must be computed"
    (again,) = drive.take_batches()
    (event,) = stored(again)
    assert event.hashes == stored(first)[0].hashes[1:] and event.parent == stored(first)[0].hashes[0]


def test_decode_that_fills_a_block_stores_one_block_under_its_parent() -> None:
    drive = Drive(make_engine())
    drive.complete(request("r", tokens(7), 4))  # positions 7..10 are made; block 1 fills when token 7 is computed
    prefill, decode = drive.take_batches()
    (event,) = stored(decode)
    assert len(event.hashes) == 1 and event.parent == stored(prefill)[0].hashes[-1]
    full = np.concatenate([tokens(7), np.frombuffer(drive.output("r")[:1], dtype=np.uint8)]).astype(np.uint32)
    assert event.hashes == tuple(Keyer(b"0").prompt_keys(full, BLOCK).tolist()[1:])


def test_the_token_sampled_last_is_never_computed_so_it_completes_no_block() -> None:
    drive = Drive(make_engine())
    drive.complete(request("r", tokens(7), 1))
    (prefill,) = drive.take_batches()
    assert len(stored(prefill)[0].hashes) == 1


def test_a_chunked_prefill_stores_one_event_per_chunk_with_the_last_hash_as_parent() -> None:
    drive = Drive(make_engine(token_budget=8))
    drive.complete(request("r", tokens(20)))
    batches = drive.take_batches()
    assert [batch.seq for batch in batches] == [0, 1, 2]
    events = [stored(batch)[0] for batch in batches]
    assert [len(event.hashes) for event in events] == [2, 2, 1]
    assert [event.parent for event in events] == [None, events[0].hashes[-1], events[1].hashes[-1]]


def test_an_abort_between_chunks_leaves_what_was_computed() -> None:
    drive = Drive(make_engine(token_budget=8))
    drive.submit(request("r", tokens(20), 5))
    drive.end_step()
    (end,) = drive.send(Aborted("r"))
    assert isinstance(end, Finished) and end.reason == "abort" and end.output_tokens == 0
    drive.run()
    assert drive.output("r") == b""
    assert drive.complete(request("again", tokens(20))).cached_tokens == 16, "two chunks were done or under way"


def test_an_abort_of_an_unknown_request_is_nothing() -> None:
    assert make_engine().step(0.0, Aborted("nobody")) == ()


def test_eviction_comes_with_the_batch_that_needs_the_space_before_its_stored_event() -> None:
    drive = Drive(make_engine(blocks=4))
    drive.complete(request("old", tokens(8)))
    drive.complete(request("other", tokens(8, start=100)))
    drive.take_batches()
    drive.complete(request("new", tokens(8, start=200)))
    (batch,) = drive.take_batches()
    kinds = [type(event) for event in batch.events]
    assert kinds == [BlocksRemoved, BlocksRemoved, BlocksStored]
    old = Keyer(b"0").prompt_keys(tokens(8), BLOCK).tolist()
    assert [event.hashes for event in removed(batch)] == [(old[1],), (old[0],)], "oldest chain, tail block first"


def test_requests_of_one_step_share_one_batch_and_the_prefix_that_the_first_computes() -> None:
    drive = Drive(make_engine())
    drive.submit(request("busy", tokens(4, start=900)))  # so that the next two wait and start together
    drive.submit(request("a", tokens(9)), request("b", tokens(9)))
    drive.end_step()
    drive.take_batches()
    drive.end_step()
    (batch,) = drive.take_batches()
    assert len(stored(batch)) == 1
    assert [entry.cached_tokens for entry in drive.all(Admitted)] == [0, 0, 8]


# --- reset -------------------------------------------------------------------------------------------------------


def test_reset_is_announced_with_the_next_scheduled_step_before_its_stored_event() -> None:
    drive = Drive(make_engine())
    drive.complete(request("r", tokens(9)))
    drive.take_batches()
    assert drive.send(CacheResetAsked()) == (CacheResetAnswered(True),)
    assert drive.take_batches() == [], "an idle engine says nothing"
    assert drive.complete(request("again", tokens(9))).cached_tokens == 0
    (batch,) = drive.take_batches()
    assert [type(event) for event in batch.events] == [BlocksCleared, BlocksStored]
    assert batch.seq == 1


def test_reset_fails_while_blocks_are_held_and_emits_nothing() -> None:
    drive = Drive(make_engine())
    drive.submit(request("r", tokens(9), 3))
    drive.end_step()
    drive.take_batches()
    assert drive.send(CacheResetAsked()) == (CacheResetAnswered(False),)
    drive.run()
    assert not any(isinstance(event, BlocksCleared) for batch in drive.take_batches() for event in batch.events)
    assert drive.complete(request("again", tokens(9))).cached_tokens == 8


# --- identity ----------------------------------------------------------------------------------------------------


@pytest.mark.covers("S18")
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"adapter": "x"}, {}),
        ({}, {"adapter": "x"}),
        ({"adapter": "x"}, {"adapter": "y"}),
        ({"salt": "x"}, {}),
        ({"salt": "x"}, {"salt": "y"}),
        ({"salt": "x"}, {"adapter": "x"}),
    ],
)
def test_adapters_and_salts_never_share(first: dict[str, str], second: dict[str, str]) -> None:
    drive = Drive(make_engine())
    drive.complete(request("one", tokens(9), 4, **first))
    assert drive.complete(request("two", tokens(9), 4, **second)).cached_tokens == 0
    assert drive.complete(request("three", tokens(9), 4, **first)).cached_tokens == 8
    assert drive.output("one") == drive.output("three") != drive.output("two")


def test_the_salt_is_named_with_the_first_block_only_and_the_adapter_with_every_event() -> None:
    drive = Drive(make_engine(token_budget=8))
    drive.complete(request("r", tokens(16), adapter="ad", salt="s"))
    events = [stored(batch)[0] for batch in drive.take_batches()]
    assert [(event.adapter, event.salt) for event in events] == [("ad", "s"), ("ad", None)]


def test_engines_with_one_hash_seed_agree_on_names_and_with_one_model_on_output() -> None:
    def run(model: str, hash_seed: str) -> tuple[tuple[int, ...], bytes]:
        drive = Drive(make_engine(model=model, hash_seed=hash_seed))
        drive.complete(request("r", tokens(9), 6))
        return stored(drive.take_batches()[0])[0].hashes, drive.output("r")

    names, output = run("m", "0")
    assert run("m", "0") == (names, output)
    assert run("m", "1")[0] != names and run("m", "1")[1] == output
    assert run("other", "0")[0] == names and run("other", "0")[1] != output, "hashes name no model, as in vLLM"


# --- payload -----------------------------------------------------------------------------------------------------


@pytest.mark.covers("RT-14")
@given(prompt_tokens=st.integers(1, 40), max_tokens=st.integers(1, 12), budget=st.integers(1, 24))
@settings(max_examples=60, deadline=None)
def test_output_does_not_depend_on_hits_or_chunks(prompt_tokens: int, max_tokens: int, budget: int) -> None:
    plain = Drive(make_engine())
    plain.complete(request("cold", tokens(prompt_tokens), max_tokens))
    plain.complete(request("warm", tokens(prompt_tokens), max_tokens))
    chunked = Drive(make_engine(token_budget=budget))
    chunked.complete(request("chunked", tokens(prompt_tokens), max_tokens))
    assert plain.output("cold") == plain.output("warm") == chunked.output("chunked")
    assert all(end.wrong_reuse_blocks == 0 for end in plain.all(Finished))


@pytest.mark.covers("RT-14")
def test_wrong_payload_is_counted_reported_and_changes_the_answer() -> None:
    drive = Drive(make_engine())
    drive.complete(request("right", tokens(21), 8))
    assert drive.send(PayloadsCorrupted(every=2)) == (CorruptionDone(4),)  # 7 blocks: five of the prompt, two made
    wrong = drive.complete(request("wrong", tokens(21), 8))
    assert wrong.cached_tokens == 20 and wrong.wrong_reuse_blocks == 3
    assert drive.output("wrong") != drive.output("right")
    assert next(entry for entry in drive.all(Admitted) if entry.request_id == "wrong").wrong_reuse_blocks == 3


@pytest.mark.covers("RT-14")
def test_what_is_computed_on_top_of_wrong_payload_is_wrong_too() -> None:
    drive = Drive(make_engine())
    drive.complete(request("first", tokens(8)))
    name = Keyer(b"0").prompt_keys(tokens(8), BLOCK).tolist()[0]
    assert drive.send(PayloadsCorrupted(name=name)) == (CorruptionDone(1),)
    drive.complete(request("longer", tokens(21)))
    again = drive.complete(request("again", tokens(21)))
    assert again.wrong_reuse_blocks > 1


def test_a_corrupt_block_in_the_middle_changes_the_answer_although_later_blocks_are_right() -> None:
    drive = Drive(make_engine())
    drive.complete(request("right", tokens(21), 8))
    name = Keyer(b"0").prompt_keys(tokens(21), BLOCK).tolist()[1]
    drive.send(PayloadsCorrupted(name=name))
    assert drive.complete(request("wrong", tokens(21), 8)).wrong_reuse_blocks == 1
    assert drive.output("wrong") != drive.output("right")


# --- the machine -------------------------------------------------------------------------------------------------


def test_a_step_that_is_not_under_way_cannot_end() -> None:
    drive = Drive(make_engine())
    drive.submit(request("r", tokens(4)))
    with pytest.raises(AssertionError, match="step 9 ended"):
        drive.engine.step(0.0, StepEnded(9))


@given(
    plan=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 10), st.integers(0, 3), st.booleans()), min_size=1, max_size=12
    ),
    blocks=st.integers(12, 24),
    budget=st.integers(3, 40),
)
@settings(max_examples=80, deadline=None)
def test_any_traffic_keeps_the_invariants_ends_and_replays_to_the_live_blocks(
    plan: list[tuple[int, int, int, bool]], blocks: int, budget: int
) -> None:
    """Shared prefixes, preemption, aborts: afterwards the events add up to exactly what is findable."""
    drive = Drive(make_engine(blocks=blocks, token_budget=budget, max_num_seqs=3))
    for i, (prompt_tokens, max_tokens, family, abort) in enumerate(plan):
        drive.submit(request(f"r{i}", tokens(prompt_tokens, start=family * 1000), max_tokens))
        if drive.under_way is not None:
            drive.end_step()
        if abort:
            drive.send(Aborted(f"r{i}"))
    drive.run()
    assert len(drive.all(Finished)) == len(plan)
    batches = drive.take_batches()
    assert [batch.seq for batch in batches] == list(range(len(batches)))
    copies: dict[int, int] = {}
    for batch in batches:
        for event in batch.events:
            match event:
                case BlocksStored():
                    for name in event.hashes:
                        copies[name] = copies.get(name, 0) + 1
                case BlocksRemoved():
                    copies[event.hashes[0]] -= 1
    live: dict[int, int] = {}
    for block in drive.engine._pool.named():
        assert block.name is not None
        live[block.name] = live.get(block.name, 0) + 1
    assert {name: count for name, count in copies.items() if count} == live


def test_same_events_same_effects() -> None:
    def run() -> list[EngineEffect]:
        drive = Drive(make_engine(blocks=12, token_budget=7))
        drive.submit(*(request(f"r{i}", tokens(11 + i), 5) for i in range(4)))
        drive.run()
        return [effect for effect in drive.effects if not isinstance(effect, PublishBatch)]

    assert run() == run()
