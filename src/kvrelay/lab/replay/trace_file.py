"""Reads a trace from a file, plain or gzip, in whichever known format it has; or makes one that `preset:NAME` names."""

from __future__ import annotations

import gzip
import hashlib
import io
from importlib import resources
from pathlib import Path

from msgspec import Struct

from kvrelay.core.traces.formats import native
from kvrelay.core.traces.formats.options import ImportOptions
from kvrelay.core.traces.formats.registry import FORMATS, format_of
from kvrelay.core.traces.presets import PREFIX, PRESETS, Preset, preset
from kvrelay.core.traces.trace import Trace, TraceError

BUNDLED = "agent_sessions.jsonl.gz"
MAX_TRACE_BYTES = 2 << 30


class TraceFile(Struct, frozen=True):
    """A trace with what is needed to name it in a manifest. `sha256` is of the unpacked bytes."""

    name: str
    sha256: str
    format: str  # a name of `core/traces/formats/registry.py`, or `preset`
    trace: Trace
    preset: Preset | None = None


def bundled_trace() -> TraceFile:
    """The cut of real agent sessions that comes with the package."""
    with resources.as_file(resources.files("kvrelay.data") / BUNDLED) as path:
        return read_trace(path)


def read_trace(path: Path, options: ImportOptions = ImportOptions(), *, kind: str | None = None) -> TraceFile:
    """Raises OSError when the file cannot be read, TraceError when it is no trace, NotTold when it does not say all.

    `kind` is the name of a format; without it the first line decides. A path `preset:NAME` names no file.
    """
    if str(path).startswith(PREFIX):
        return _made(str(path))
    packed = path.read_bytes()
    plain = _unpack(packed) if packed[:2] == b"\x1f\x8b" else packed
    lines = plain.splitlines()
    if kind is None:
        kind = format_of(next((line for line in lines if line.strip()), b""))
    trace = FORMATS[kind].read(lines, options)
    return TraceFile(path.name, hashlib.sha256(plain).hexdigest(), kind, trace)


def _made(name: str) -> TraceFile:
    wanted = name.removeprefix(PREFIX)
    if wanted not in PRESETS:
        raise TraceError(1, f"unknown preset `{wanted}`", "one of " + ", ".join(f"{PREFIX}{one}" for one in PRESETS))
    made = preset(wanted)
    plain = b"\n".join(native.write(made.trace).lines)
    return TraceFile(name, hashlib.sha256(plain).hexdigest(), "preset", made.trace, made)


def _unpack(packed: bytes) -> bytes:
    """Reads no further than the limit: a small file can hold more than the memory does."""
    try:
        plain = gzip.GzipFile(fileobj=io.BytesIO(packed)).read(MAX_TRACE_BYTES + 1)
    except (OSError, EOFError) as problem:
        raise TraceError(1, f"a damaged gzip file ({problem})", "a whole gzip file") from problem
    if len(plain) > MAX_TRACE_BYTES:
        raise TraceError(1, "more than that after unpacking", f"at most {MAX_TRACE_BYTES} bytes")
    return plain
