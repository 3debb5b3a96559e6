"""What the gateway's process costs and says of itself, second by second."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec

INTERVAL_S = 1.0


class Moment(msgspec.Struct, frozen=True):
    """One look at the process."""

    at_s: float
    rss_mb: float
    open_fds: int
    cpu_s: float
    live_requests: int


def look(pid: int, live_requests: int) -> Moment:
    with open(f"/proc/{pid}/statm", "rb") as file:
        rss_mb = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return Moment(time.monotonic(), rss_mb, len(os.listdir(f"/proc/{pid}/fd")), cpu_s, live_requests)


async def watch(pid: int, live_requests: Callable[[], int], moments: list[Moment]) -> None:
    """Until cancelled."""
    while True:
        moments.append(look(pid, live_requests()))
        await asyncio.sleep(INTERVAL_S)


async def ask_json(url: str) -> Any:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return await response.json()


async def ask_text(url: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return await response.text()


async def until_quiet(admin_url: str, within_s: float) -> dict[str, Any]:
    """The status once nothing is open any more, or as it is when the time is over."""
    until_s = time.monotonic() + within_s
    while True:
        status = await ask_json(f"{admin_url}/admin/status")
        if not any(gauges(status).values()) or time.monotonic() > until_s:
            return status
        await asyncio.sleep(0.1)


def gauges(status: dict[str, Any]) -> dict[str, float]:
    """Everything in a status that must be 0 when nobody asks for anything."""
    values = {
        "live_requests": status["live_requests"],
        "in_flight_prompts": status["in_flight_prompts"],
        "open_requests": status["gateway"]["open_requests"],
        "open_upstream_calls": status["gateway"]["open_upstream_calls"],
        "receipts_dropped": status["gateway"]["receipts_dropped"],
    }
    for worker in status["workers"]:
        for target in worker["targets"]:
            for name in ("active_requests", "queued_requests", "active_prefill_tokens", "active_decode_blocks"):
                values[f"{worker['name']}.{name}"] = target[name]
    return values
