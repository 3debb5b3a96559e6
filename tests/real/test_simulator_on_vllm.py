"""Hit tokens that the simulator predicts, against the counters of a real vLLM worker that evicts."""

from __future__ import annotations

import json
import random
import re
import urllib.request
from collections.abc import Iterator

import pytest

from kvrelay.core.cachesim.engines import SglangRadix, VllmBlocks
from kvrelay.core.cachesim.prefix import run_prefix_caches
from kvrelay.core.cachesim.prefix_trace import PrefixRequest, PrefixTrace
from kvrelay.edge.system.ports import spare_port
from tests.real.client import VOCABULARY, Client
from tests.real.engine import BLOCK_SIZE, EngineUnavailable, VllmWorker, installed

pytestmark = [pytest.mark.real, pytest.mark.timeout(1500)]

BLOCKS = 120
USABLE_BLOCKS = BLOCKS - 1  # vLLM keeps one for itself
REQUESTS, OUTPUT_TOKENS = 200, 8


@pytest.fixture(scope="module")
def small_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmWorker]:
    try:
        worker = VllmWorker(
            installed(), "predicted", port=spare_port(), cpu=0, folder=tmp_path_factory.mktemp("vllm"), blocks=BLOCKS
        )
        worker.start()
        try:
            worker.wait_until_up()
            yield worker
        finally:
            worker.kill()
    except EngineUnavailable as reason:
        pytest.fail(f"the real engine cannot run here: {reason}", pytrace=False)


def conversations(seed: int) -> list[list[int]]:
    """Prompts of a dozen conversations that share a head and grow; some come back soon, some when they are evicted."""
    chance = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [chance.randrange(VOCABULARY) for _ in range(count)]

    head = tokens(300)
    open_ones = [head + tokens(chance.randrange(100, 600)) for _ in range(12)]
    prompts = []
    for _ in range(REQUESTS):
        number = min(int(chance.paretovariate(0.8)) - 1, len(open_ones) - 1)
        prompt = open_ones.pop(number)
        prompts.append(prompt)
        grown = prompt + tokens(chance.randrange(10, 200))
        open_ones.insert(0, grown if len(grown) < 2_000 else head + tokens(300))
    return prompts


def as_trace(prompts: list[list[int]]) -> PrefixTrace:
    """Blocks are numbered along their chains, as the engine names them."""
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    requests = []
    for at, prompt in enumerate(prompts):
        parent, blocks = -1, []
        for start in range(0, len(prompt) - BLOCK_SIZE + 1, BLOCK_SIZE):
            key = (parent, tuple(prompt[start : start + BLOCK_SIZE]))
            parent = numbers.setdefault(key, len(numbers))
            blocks.append(parent)
        requests.append(PrefixRequest(float(at), "s", tuple(blocks), len(prompt), OUTPUT_TOKENS))
    return PrefixTrace(BLOCK_SIZE, tuple(requests), len(numbers))


def hit_counter(worker: VllmWorker) -> float:
    with urllib.request.urlopen(f"{worker.url}/metrics", timeout=30) as response:
        page = response.read().decode()
    return sum(float(value) for value in re.findall(r"^vllm:prefix_cache_hits_total\{[^}]*\} (\S+)$", page, re.M))


@pytest.mark.covers("SM-07", "SM-04")
def test_hit_tokens_of_200_requests_are_predicted_within_one_per_cent(small_worker: VllmWorker, capsys) -> None:
    prompts = conversations(seed=11)
    trace = as_trace(prompts)
    client = Client(small_worker.url, small_worker.url, small_worker._folder)
    counted_before = hit_counter(small_worker)
    measured = []
    for prompt in prompts:
        answer = json.loads(client.complete(prompt, max_tokens=OUTPUT_TOKENS))
        measured.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    counted = hit_counter(small_worker) - counted_before
    predicted = run_prefix_caches(trace, lambda on_gone: VllmBlocks(USABLE_BLOCKS, on_gone))
    radix = run_prefix_caches(trace, lambda on_gone: SglangRadix(USABLE_BLOCKS, on_gone))
    error = (predicted.hit.tokens - sum(measured)) / sum(measured)
    with capsys.disabled():
        print(
            f"\n{REQUESTS} requests, {trace.input_tokens:,} prompt tokens, {BLOCKS} blocks: measured {sum(measured):,} "
            f"(engine's counter {counted:,.0f}), predicted {predicted.hit.tokens:,} ({100 * error:+.2f} %), "
            f"{predicted.evicted_blocks:,} blocks evicted; radix model {radix.hit.tokens:,}"
        )
    assert counted == sum(measured)
    assert predicted.evicted_blocks > 500, "the sequence has to evict"
    assert 0.2 < sum(measured) / trace.input_tokens < 0.9
    assert abs(error) <= 0.01
