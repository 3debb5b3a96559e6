"""This machine: how much memory there is, and which ports listen beyond loopback."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import urlsplit

_LISTEN = "0A"
_ALL = ("00000000", "0" * 32)


def memory_bytes() -> int | None:
    """The smaller of the machine's memory and the limit of our control group."""
    limits = [limit for limit in (_total_bytes(), _group_limit_bytes()) if limit is not None]
    return min(limits, default=None)


def _total_bytes() -> int | None:
    return _meminfo_bytes("MemTotal")


def _meminfo_bytes(wanted: str) -> int | None:
    for line in _lines(Path("/proc/meminfo")):
        name, _, rest = line.partition(":")
        if name == wanted:
            return int(rest.split()[0]) * 1024
    return None


def _group_used_bytes() -> int | None:
    return _group_bytes("memory.current", "memory/memory.usage_in_bytes")


def _group_limit_bytes() -> int | None:
    return _group_bytes("memory.max", "memory/memory.limit_in_bytes")


def _group_bytes(*files: str) -> int | None:
    """From the first that has a number: version 2 of control groups, then version 1."""
    for file in files:
        text = "".join(_lines(Path("/sys/fs/cgroup") / file)).strip()
        if text.isdigit():
            return int(text)
    return None


def free_bytes() -> int | None:
    """What processes could still take without swapping, within the limit of our control group."""
    free = _meminfo_bytes("MemAvailable")
    limit, used = _group_limit_bytes(), _group_used_bytes()
    if limit is None or used is None:
        return free
    left = max(0, limit - used)
    return left if free is None else min(free, left)


def has_accelerator() -> bool:
    """A GPU that NVIDIA's or AMD's driver serves."""
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd"))


def wide_open_ports() -> frozenset[int] | None:
    """TCP ports that listen on all interfaces; None where the system does not tell."""
    tables = [_lines(Path(path)) for path in ("/proc/net/tcp", "/proc/net/tcp6")]
    return _wide_open(*tables) if any(tables) else None


def _wide_open(*tables: list[str]) -> frozenset[int]:
    ports: set[int] = set()
    for line in (line for table in tables for line in table[1:]):
        fields = line.split()
        address, _, port = fields[1].partition(":")
        if fields[3] == _LISTEN and address in _ALL:
            ports.add(int(port, 16))
    return frozenset(ports)


def is_local(url: str) -> bool:
    """Does this address of a worker belong to this machine? Asks no name server but for names."""
    host = urlsplit(url).hostname or ""
    try:
        address = socket.getaddrinfo(host, None)[0][4][0]
        with socket.socket(socket.AF_INET6 if ":" in str(address) else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except (OSError, UnicodeError):
        return False
    return True


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
