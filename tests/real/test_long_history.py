"""A gateway that starts late at a worker that has published more than its own replay socket holds at a time."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq

from kvrelay.edge.connectors.vllm.replay import Replayed, replay
from tests.real.engine import BLOCK_SIZE, MODEL_NAME, VllmWorker, prefill

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

BATCHES = 2_500  # ZMQ holds 1,000 for a slow reader, and then drops
AT_ONCE = 6


@pytest.mark.covers("TP-02")
def test_the_whole_history_is_replayed_however_long_it_is(workers: tuple[VllmWorker, VllmWorker]) -> None:
    worker = workers[0]
    chance = random.Random(5)
    history = _replayed(worker)
    prompts = [[chance.randrange(250) for _ in range(BLOCK_SIZE + 1)] for _ in range(200)]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        while len(history) < BATCHES:  # one batch per step in which something new was computed
            list(threads.map(lambda prompt: prefill(worker.url, prompt), prompts))
            prompts = [[chance.randrange(250) for _ in range(BLOCK_SIZE + 1)] for _ in range(400)]
            history = _replayed(worker)
    assert [seq for seq, _ in history] == list(range(len(history))), (
        "from the first batch of its life on, without a hole"
    )


def _replayed(worker: VllmWorker) -> tuple[tuple[int, bytes], ...]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    topic = f"kv@{worker.name}@{MODEL_NAME}"
    answer = asyncio.run(replay(context, worker.replay, topic=topic, from_seq=0, timeout_s=30))
    context.destroy(linger=0)
    assert isinstance(answer, Replayed), answer
    return answer.messages
