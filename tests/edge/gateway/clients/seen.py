"""What a client saw, as plain values that can be compared.

Every conversation is led three times: with the worker, so that its cache knows the prompts; with the worker again; and
through the gateway. The last two must be equal, but for the time at which an answer was made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pydantic

from kvrelay.edge.gateway.gateway import Gateway
from kvrelay.edge.worker.launch import RunningWorker
from tests.edge.gateway.scripted import until

SAME_ID = {"x-request-id": "same"}  # the mock names its answers after it
TIMES = frozenset(("created", "created_at"))


def plain(value: Any) -> Any:
    """Objects of an SDK with all their members, the ones that the SDK does not know included."""
    if isinstance(value, pydantic.BaseModel):
        return plain(value.model_dump(mode="json", warnings=False))
    if isinstance(value, Mapping):
        return {name: plain(member) for name, member in value.items() if name not in TIMES}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value


def refused(error: Exception) -> dict[str, Any]:
    """What an SDK makes of a refusal: its class decides which `except` of a user catches it."""
    status, body = (getattr(error, name, None) for name in ("status_code", "body"))
    return {"class": type(error).__name__, "status": status, "body": body, "text": str(error)}


async def same_through(worker: RunningWorker, gateway: Gateway, talk: Callable[[str], Any]) -> Any:
    """What a blocking `talk(url)` returned, on both ways alike."""

    async def in_a_thread(url: str) -> Any:
        return await asyncio.to_thread(talk, url)

    return await same_through_async(worker, gateway, in_a_thread)


async def same_through_async(worker: RunningWorker, gateway: Gateway, talk: Callable[[str], Awaitable[Any]]) -> Any:
    await talk(worker.url)
    direct = plain(await talk(worker.url))
    relayed = plain(await talk(gateway.url))
    await until(lambda: not gateway.host.requests)  # a client may know before the gateway that its answer is complete
    assert relayed == direct
    return relayed
