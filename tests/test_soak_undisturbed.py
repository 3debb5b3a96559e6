"""What the soak holds answers against is what a mock worker says."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from bench.soak.undisturbed import undisturbed_text

from kvrelay.edge.worker.launch import MockFleet
from kvrelay.edge.worker.spec import MockSpec
from tests.edge.gateway.direct import ask, post


@pytest.mark.parametrize("prompt_tokens", [1, 15, 16, 17, 64])
async def test_the_same_letters(prompt_tokens: int) -> None:
    prompt = np.arange(300, 300 + prompt_tokens, dtype=np.uint32)
    async with MockFleet([MockSpec(name="m", prefill_tokens_per_s=1e6, decode_ms=0.1)]) as fleet:
        body = {"prompt": prompt.tolist(), "max_tokens": 40}
        answer = await ask(fleet.workers[0].url, post("/v1/completions", body))
    said = msgspec.json.decode(answer.body)["choices"][0]["text"]
    assert undisturbed_text(prompt, 40, model="mock-model", block_size_tokens=16) == said
