"""Checks that an ended arm left nothing behind: no process that we started, no port that it listened on."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

CHECK_S = 3.0
POLL_S = 0.05


async def leftovers(pids: Iterable[int], urls: Iterable[str]) -> list[str]:
    """What is still there after a short grace, in words; empty when the arm was cleaned up."""
    pids, addresses = list(pids), [_address(url) for url in urls]
    for _ in range(int(CHECK_S / POLL_S)):
        found = [f"process {pid}" for pid in pids if _alive(pid)]
        found += [f"port {port} on {host}" for host, port in addresses if _listens(host, port)]
        if not found:
            return []
        await asyncio.sleep(POLL_S)
    return found


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname and parts.port, url
    return parts.hostname, parts.port


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return False  # the number was given to somebody else's process
    return True


def _listens(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.2)
        return probe.connect_ex((host, port)) == 0
