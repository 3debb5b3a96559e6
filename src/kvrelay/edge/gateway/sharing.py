"""Do the workers share KV? Asked of each of them, or ordered: the way back to what every worker computed itself.

The switch is in the worker's process, and an order is kept by the gateway: workers that join or start anew while it
holds are told before they get a request. A gateway that starts anew knows of no order.
"""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec import Struct

from kvrelay.edge.connectors.base import WorkerAnswerUnusable, WorkerUnreachable
from kvrelay.edge.fleet.static import Fleet, UnknownWorker

_WORDS = {True: "on", False: "off", None: "none"}


class Sharing(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of PUT /admin/sharing."""

    on: bool


async def ask_all(fleet: Fleet, on: bool | None) -> dict[str, Any]:
    """What each worker says: `on`, `off`, `none` (it has no shared tier), or `unknown` and why. `on` None only asks."""
    return {"workers": list(await asyncio.gather(*(_ask(fleet, name, on) for name in fleet.names())))}


async def _ask(fleet: Fleet, name: str, on: bool | None) -> dict[str, Any]:
    try:
        holds = await fleet.sharing(name, on=on)
    except (WorkerUnreachable, WorkerAnswerUnusable, UnknownWorker) as problem:
        return {"worker": name, "sharing": "unknown", "why": str(problem)}
    return {"worker": name, "sharing": _WORDS[holds], "why": None}
