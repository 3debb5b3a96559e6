"""S19 to S23 over HTTP: what of a request can be matched, and what is said where nothing can."""

from __future__ import annotations

import asyncio
from typing import Any

from kvrelay.core.model.units import RouteReason
from kvrelay.edge.fleet.silence import SILENT_AFTER_TOKENS
from tests.scenarios.client import CHAT, Seen
from tests.scenarios.stage import Stage

BLOCK, LEAST_BLOCKS = 16, 14  # of every text here
FILLER = "The quick brown fox jumps over the lazy dog. "


def _text(stage: Stage) -> str:
    """Some twenty blocks that nobody has seen: a token of the mock's tokenizer is a byte."""
    return f"{stage.prompt(8)} " + FILLER * 8


async def s19_text_parts_are_scored_and_images_are_not(stage: Stage) -> None:
    text, more = _text(stage), FILLER
    contents: list[Any] = [
        text,
        [{"type": "text", "text": text}],
        [{"type": "text", "text": text}, {"type": "text", "text": more}],
    ]
    for content in contents:
        await _sent_until_matched(stage, {"messages": [{"role": "user", "content": content}], "max_tokens": 4})
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    message = {"role": "user", "content": [{"type": "text", "text": text}, image]}
    seen = await stage.client.send(CHAT, {"messages": [message], "max_tokens": 4})
    if stage.calm:
        assert (seen.status, stage.receipt(seen).unscored_because) == (200, "multimodal_input")


async def _sent_until_matched(stage: Stage, body: dict[str, Any]) -> None:
    """Sent again, the claim is what the engine hits, within a block; never is it more than that."""
    first = await stage.client.send(CHAT, body)
    async with asyncio.timeout(60):
        while stage.calm:
            assert first.status == 200
            receipt = stage.receipt(await stage.client.send(CHAT, body))
            claimed, actual = receipt.matched_tokens_at_route, receipt.actual_cached_tokens
            if claimed is not None and actual is not None:
                assert claimed <= actual + BLOCK
                if claimed >= LEAST_BLOCKS * BLOCK and actual - claimed <= BLOCK:
                    return
            await asyncio.sleep(0.05)


async def s20_other_endpoints_are_proxied_and_said_to_be_unscored(stage: Stage) -> None:
    seen: list[Seen] = []
    for _ in range(6):
        body = {"input": [{"role": "user", "content": FILLER}], "stream": False}
        seen.append(await stage.client.send("/v1/responses", body))
        seen.append(await stage.client.send("/v1/models", b"", method="GET"))
        seen.append(await stage.client.send("/detokenize", {"tokens": [72, 105]}))
    if stage.calm:
        assert [each.status for each in seen] == [200, 200, 200] * 6
        receipts = [stage.receipt(each) for each in seen]
        assert all(receipt.unscored_because in ("path_not_scored", "no_body") for receipt in receipts)
        assert {receipt.route_reason for receipt in receipts} == {RouteReason.CACHE_NOT_SCORED}


async def s21_tools_and_options_are_part_of_the_prompt(stage: Stage) -> None:
    message = {"role": "user", "content": _text(stage)}
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "ab"]
    for more in ({}, {"tools": tools}, {"tools": tools[::-1]}, {"add_generation_prompt": False}):
        await _sent_until_matched(stage, {"messages": [message], "max_tokens": 4, **more})


async def s22_every_shape_of_a_completions_prompt(stage: Stage) -> None:
    ids = stage.prompt(120)
    shapes = ["text", ["a text", "and another"], ids, [ids, [5, 6, 7], ids[:33]]]
    for shape in shapes * 4:
        seen = await stage.client.complete(shape, stream=False)
        if stage.calm:
            assert seen.status == 200
        if stage.calm and shape is shapes[-1]:
            assert stage.receipt(seen).prompt_tokens == 156, "a batch is charged with all its prompts"


async def s23_a_fleet_whose_events_go_elsewhere(stage: Stage) -> None:
    """The topic is wrong: nothing can ever match, and that is said."""
    prompt = stage.prompt(640)
    for _ in range(-(-2 * SILENT_AFTER_TOKENS // 640)):
        await stage.client.complete(stage.prompt(640))
    if stage.calm:
        await stage.until(lambda: any(view.events_problem for view in stage.gateway.fleet.views()))
        seen = [await stage.client.complete(prompt) for _ in range(3)]
        assert {stage.receipt(each).matched_tokens_at_route for each in seen} == {0}
        assert not any(each.reason == RouteReason.CACHE_PLUS_LOAD for each in seen)
