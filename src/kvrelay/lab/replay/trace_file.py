"""Reads a trace from a file, plain or gzip, in whichever known format it has."""

from __future__ import annotations

import gzip
import hashlib
import io
from importlib import resources
from pathlib import Path

from msgspec import Struct

from kvrelay.core.traces.mooncake import read_mooncake
from kvrelay.core.traces.trace import Trace, TraceError
from kvrelay.core.traces.weka import read_weka

BUNDLED = "agent_sessions.jsonl.gz"
MAX_TRACE_BYTES = 2 << 30


class TraceFile(Struct, frozen=True):
    """A trace with what is needed to name it in a manifest. `sha256` is of the unpacked bytes."""

    name: str
    sha256: str
    format: str  # agent_sessions | mooncake
    trace: Trace


def bundled_trace() -> TraceFile:
    """The cut of real agent sessions that comes with the package."""
    with resources.as_file(resources.files("kvrelay.data") / BUNDLED) as path:
        return read_trace(path)


def read_trace(path: Path) -> TraceFile:
    """Raises OSError when the file cannot be read and TraceError when it is no trace."""
    packed = path.read_bytes()
    plain = _unpack(packed) if packed[:2] == b"\x1f\x8b" else packed
    lines = plain.splitlines()
    first = next((line for line in lines if line.strip()), b"")
    if b'"requests"' in first:
        kind, trace = "agent_sessions", read_weka(lines)
    elif b'"hash_ids"' in first or b'"input_length"' in first:
        kind, trace = "mooncake", read_mooncake(lines)
    else:
        found = "neither of the known formats" if first else "an empty file"
        legal = "agent sessions (`requests` with `hash_ids`) or Mooncake rows (`timestamp`, `input_length`, `hash_ids`)"
        raise TraceError(1, found, legal)
    return TraceFile(path.name, hashlib.sha256(plain).hexdigest(), kind, trace)


def _unpack(packed: bytes) -> bytes:
    """Reads no further than the limit: a small file can hold more than the memory does."""
    try:
        plain = gzip.GzipFile(fileobj=io.BytesIO(packed)).read(MAX_TRACE_BYTES + 1)
    except (OSError, EOFError) as problem:
        raise TraceError(1, f"a damaged gzip file ({problem})", "a whole gzip file") from problem
    if len(plain) > MAX_TRACE_BYTES:
        raise TraceError(1, "more than that after unpacking", f"at most {MAX_TRACE_BYTES} bytes")
    return plain
