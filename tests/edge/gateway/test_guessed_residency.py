"""Workers of which nothing is known but that they speak OpenAI: what they hold is a guess, and says so."""

from __future__ import annotations

import pytest

from kvrelay.core.model.units import IndexState
from tests.edge.gateway.scripted import ScriptedWorker, client_of, receipts, running, token_body


@pytest.mark.covers("MK-03")
async def test_what_was_sent_to_a_worker_is_taken_for_what_it_holds_and_marked_as_a_guess() -> None:
    workers = ScriptedWorker("a"), ScriptedWorker("b")
    for worker in workers:
        await worker.start()
    generic = [{"name": worker.name, "url": worker.url, "adapter": "openai"} for worker in workers]
    async with running(*workers, workers=generic) as gateway, client_of(gateway) as client:
        _, _, first = await client.post(token_body(400))
        _, _, again = await client.post(token_body(400))
        assert again["x-kvrelay-worker"] == first["x-kvrelay-worker"]
        matched = (first["x-kvrelay-matched-tokens"], again["x-kvrelay-matched-tokens"])
        assert matched == ("0", "384"), "the last of 25 full blocks is always computed again"
        newest = receipts(gateway)[0]
        assert (newest.index_state, newest.block_size) == (IndexState.APPROXIMATE, 16)
