"""Prefix caches: the classes of misses, and the two engines that keep prefixes differently."""

from __future__ import annotations

import random

import pytest

from kvrelay.core.cachesim.engines import SglangRadix, VllmBlocks
from kvrelay.core.cachesim.eviction.lru import Lru
from kvrelay.core.cachesim.eviction.ttl import Ttl
from kvrelay.core.cachesim.misses import Miss
from kvrelay.core.cachesim.prefix import PrefixCaches, run_prefix_caches
from kvrelay.core.cachesim.prefix_trace import PrefixRequest, PrefixTrace, prefix_trace
from kvrelay.core.cachesim.routers import ROUTERS, RoundRobin
from kvrelay.core.traces.trace import SESSION_SCOPE, Session, Trace, Turn

SIZE = 16


def trace(*chains: tuple[int, ...], every_s: float = 1.0, extra_tokens: int = 1) -> PrefixTrace:
    """Requests of full blocks and a few tokens more."""
    requests = tuple(
        PrefixRequest(i * every_s, "s", chain, len(chain) * SIZE + extra_tokens) for i, chain in enumerate(chains)
    )
    return PrefixTrace(SIZE, requests, 1 + max(block for chain in chains for block in chain))


def missed_blocks(result) -> dict[Miss, int]:
    return {kind: counted.blocks for kind, counted in result.misses.items() if counted.blocks}


@pytest.mark.covers("SM-03", "TP-10")
def test_every_missed_block_has_the_class_of_what_would_have_been():
    chains = ((0, 1), (0, 2), (5, 6, 7), (0, 1))
    result = run_prefix_caches(trace(*chains), lambda on_gone: Lru(4, on_gone))
    assert missed_blocks(result) == {Miss.COLD: 5, Miss.NEW_SUFFIX: 1, Miss.CAPACITY: 1}
    assert result.misses[Miss.BELOW_BLOCK].tokens == 4
    assert result.hit.blocks == 2


@pytest.mark.covers("SM-01", "SM-03")
def test_what_time_took_is_no_lack_of_room():
    result = run_prefix_caches(trace((0, 1), (0, 1), every_s=60), lambda on_gone: Ttl(100, on_gone, ttl_s=30))
    assert missed_blocks(result) == {Miss.COLD: 2, Miss.EXPIRED: 2}
    assert (result.expired_blocks, result.evicted_blocks) == (2, 0)


@pytest.mark.covers("SM-03")
def test_what_another_worker_holds_is_lost_to_routing_and_a_restart_invalidates():
    chains = trace((0, 1), (0, 1), (0, 1), (0, 1))
    caches = PrefixCaches(chains, lambda on_gone: Lru(10, on_gone), RoundRobin(2), workers=2)
    for request in chains.requests[:2]:
        caches.serve(request)
    assert missed_blocks(caches.result) == {Miss.COLD: 2, Miss.OTHER_WORKER: 2}
    caches.invalidate(0)
    caches.invalidate(1)
    caches.serve(chains.requests[2])
    assert missed_blocks(caches.result) == {Miss.COLD: 2, Miss.OTHER_WORKER: 2, Miss.INVALIDATED: 2}
    caches.result.check()


@pytest.mark.covers("SM-03")
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("make", [Lru, VllmBlocks, SglangRadix, lambda c, g: Ttl(c, g, ttl_s=7)])
def test_the_classes_add_up_to_the_misses(router, make):
    chance = random.Random(router)
    texts = [tuple(range(base, base + 12)) for base in range(0, 120, 12)]
    chains = tuple(chance.choice(texts)[: chance.randrange(1, 13)] for _ in range(300))
    made = trace(*chains, extra_tokens=0)
    caches = PrefixCaches(made, lambda on_gone: make(20, on_gone), ROUTERS[router](3), workers=3)
    for i, request in enumerate(made.requests):
        caches.serve(request)
        if i % 100 == 50:
            caches.invalidate(1)
        caches.result.check()
    assert sum(share.requests for share in caches.result.workers) == 300


@pytest.mark.covers("SM-04")
def test_two_engines_differ_on_a_known_trace():
    """Room for 6. The long chain is used once; then short ones push. vLLM gives up its end, block by block; a radix
    tree loses the whole leaf."""
    chains = trace((0, 1, 2, 3), (10,), (11,), (0, 1, 2, 3), extra_tokens=1)
    blocks = run_prefix_caches(chains, lambda on_gone: VllmBlocks(6, on_gone))
    radix = run_prefix_caches(chains, lambda on_gone: SglangRadix(6, on_gone))
    assert (blocks.hit.blocks, blocks.evicted_blocks) == (3, 2)
    assert (radix.hit.blocks, radix.evicted_blocks) == (0, 5)


def test_an_engine_computes_the_last_token_in_any_case():
    whole = trace((0, 1), (0, 1), extra_tokens=0)
    assert run_prefix_caches(whole, lambda on_gone: Lru(9, on_gone)).hit.blocks == 2
    vllm = run_prefix_caches(whole, lambda on_gone: VllmBlocks(9, on_gone))
    assert vllm.hit.blocks == 1
    assert vllm.misses[Miss.BELOW_BLOCK].blocks == 1


def test_a_request_that_no_engine_of_this_size_takes_is_counted():
    caches = PrefixCaches(trace((0, 1, 2), (0, 1, 2)), lambda on_gone: VllmBlocks(3, on_gone))
    for request in trace((0, 1, 2), (0, 1, 2)).requests:
        caches.serve(request)
    assert caches.caches[0].too_large == 2 and caches.result.hit.blocks == 0


@pytest.mark.parametrize("make", [VllmBlocks, SglangRadix])
def test_an_engine_never_holds_more_than_it_has_and_says_what_left(make):
    chance = random.Random(9)
    texts = [tuple(range(base, base + 10)) for base in range(0, 100, 10)]
    present: set[int] = set()

    def left(key, why):
        present.remove(key)

    cache = make(24, left)
    for _ in range(500):
        chain = chance.choice(texts)[: chance.randrange(1, 11)]
        hits = next((i for i, key in enumerate(chain) if key not in cache), len(chain))
        present.update(chain)
        cache.run(chain, hits=hits, answer_blocks=chance.randrange(2), partial_blocks=chance.randrange(2))
        assert {key for key in range(100) if key in cache} == present
        assert len(present) <= 24


def test_one_id_behind_two_different_blocks_is_two_contents():
    turns = (Turn(0.0, 0.0, (1, 2), 32, 1), Turn(1.0, 0.0, (3, 2), 32, 1), Turn(2.0, 0.0, (1, 2), 32, 1))
    made = prefix_trace(Trace(SIZE, SESSION_SCOPE, (Session("a", "a", turns),)))
    assert [request.blocks for request in made.requests] == [(0, 1), (2, 3), (0, 1)]
    assert made.distinct_blocks == 4
