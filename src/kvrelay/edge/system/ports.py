"""Ports for what must come back on the address that it had."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST, _HIGHEST = 10_000, 65_535
_TRIES = 200
LISTEN_TRIES = 5  # for who can choose again: a port that was free may be taken before one listens on it


def spare_port(host: str = "127.0.0.1") -> int:
    """A free port that no outgoing connection is given.

    A port from the kernel's own range (which port 0 takes) can go to a connection of anybody's while the one who
    listened there is away, and then it cannot listen there again.
    """
    first, last = _outgoing_range()
    legal: list[int] = [*range(_LOWEST, min(first, _HIGHEST)), *range(max(last + 1, _LOWEST), _HIGHEST)]
    for port in random.sample(legal, k=min(_TRIES, len(legal))):
        if _is_free(host, port):
            return port
    return _any_port(host)


def _outgoing_range() -> tuple[int, int]:
    try:
        first, last = _OUTGOING.read_text().split()
    except (OSError, ValueError):
        return 32_768, 65_535  # of no Linux: that of the others is at the top
    return int(first), int(last)


def _is_free(host: str, port: int) -> bool:
    try:
        with _probe(host) as probe:
            probe.bind((host, port))
    except OSError:
        return False
    return True


def _any_port(host: str) -> int:
    """Where the kernel keeps nothing apart."""
    with _probe(host) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _probe(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
