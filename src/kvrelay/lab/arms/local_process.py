"""What this machine's own /proc tells of a process: who listens on a port, and whether it holds a GPU. Linux only.

Nothing here asks the process itself, and nothing is believed that somebody wrote into a file. Where /proc cannot tell
(another host, another system, another user's process), the answer is None and not a guess.
"""

from __future__ import annotations

import ipaddress
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from kvrelay.core.gates.evidence import Hardware
from kvrelay.edge.system.urls import is_loopback

_PROC = Path("/proc")
_LISTEN, _ESTABLISHED = "0A", "01"
_ASK_S = 10.0


def listener_pid(url: str) -> int | None:
    """The process on this machine that listens where a loopback URL points."""
    parts = urlsplit(url)
    if parts.port is None or not is_loopback(parts.hostname or ""):
        return None
    inodes = {f"socket:[{inode}]" for inode in _listening_inodes(parts.port)}
    return next((pid for pid in _pids() if inodes & set(_open_files(pid))), None) if inodes else None


def hardware_of_process(pid: int) -> Hardware:
    """GPU when the process or one below it has a GPU's device open, CPU when none has, unknown when we may not look."""
    family = [pid, *_descendants(pid)]
    if not os.access(_PROC / str(pid) / "fd", os.R_OK):
        return Hardware.UNKNOWN
    files = [name for member in family for name in _open_files(member)]
    return Hardware.GPU if any(name.startswith("/dev/nvidia") for name in files) else Hardware.CPU


def gpu_uuids(pid: int) -> tuple[str, ...] | None:
    """Of the GPUs that the process or one below it computes on; None when the driver's tool cannot be asked."""
    command = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    family = {str(member) for member in (pid, *_descendants(pid))}
    rows = [line.split(",") for line in answer.stdout.splitlines() if "," in line]
    return tuple(sorted({uuid.strip() for owner, uuid in rows if owner.strip() in family}))


def environment_of(pid: int, name: str) -> str | None:
    """One variable of a process as it was started; empty text is a value."""
    try:
        entries = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return None
    start = f"{name}=".encode()
    return next((entry[len(start) :].decode("utf-8", "replace") for entry in entries if entry.startswith(start)), None)


def command_line(pid: int) -> tuple[str, ...] | None:
    """The words that a process was started with; None when we may not look or it is gone."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    return tuple(word.decode("utf-8", "replace") for word in words[:-1]) or None


def log_path(pid: int) -> str | None:
    """The regular file that the process writes its standard error to."""
    try:
        target = os.readlink(_PROC / str(pid) / "fd" / "2")
    except OSError:
        return None
    return target if Path(target).is_file() else None


def remote_peers(pid: int) -> tuple[str, ...] | None:
    """Addresses beyond loopback that the process or one below it is connected to now; None when we may not look."""
    if not os.access(_PROC / str(pid) / "fd", os.R_OK):
        return None
    sockets = {name for member in (pid, *_descendants(pid)) for name in _open_files(member)}
    rows = [fields for fields in _tcp_rows() if fields[3] == _ESTABLISHED and f"socket:[{fields[9]}]" in sockets]
    addresses = {_address(fields[2].rpartition(":")[0]) for fields in rows}
    return tuple(sorted(str(address) for address in addresses if not _is_local(address)))


def _descendants(pid: int) -> list[int]:
    parents = dict(filter(None, map(_parentage, _pids())))
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {pid})


def _parentage(pid: int) -> tuple[int, int] | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    return pid, int(text.rpartition(")")[2].split()[1])


def _listening_inodes(port: int) -> Iterator[str]:
    for fields in _tcp_rows():
        if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
            yield fields[9]


def _tcp_rows() -> Iterator[list[str]]:
    """The kernel's table of TCP sockets: fields 1 and 2 are the addresses, 3 the state, 9 the inode."""
    for table in ("tcp", "tcp6"):
        try:
            rows = (_PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        yield from (row.split() for row in rows)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Words of four bytes, each in the machine's order."""
    words = [bytes.fromhex(text[start : start + 8]) for start in range(0, len(text), 8)]
    packed = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    return ipaddress.IPv4Address(packed) if len(packed) == 4 else ipaddress.IPv6Address(packed)


def _is_local(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _pids() -> Iterator[int]:
    try:
        names = os.listdir(_PROC)
    except OSError:
        return
    yield from (int(name) for name in names if name.isdigit())


def _open_files(pid: int) -> Iterator[str]:
    folder = _PROC / str(pid) / "fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        try:
            yield os.readlink(folder / name)
        except OSError:
            continue  # closed meanwhile
