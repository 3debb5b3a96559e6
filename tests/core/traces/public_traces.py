"""The public trace cuts that tests compare with, where this checkout has them beside it."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvrelay.core.traces.formats.options import ImportOptions
from kvrelay.core.traces.formats.registry import FORMATS, format_of
from kvrelay.core.traces.trace import Trace

FOLDER = next(
    (folder for parent in Path(__file__).parents if (folder := parent / "shared" / "traces").is_dir()), Path("absent")
)
needs_public_traces = pytest.mark.skipif(not FOLDER.is_dir(), reason="no ../shared/traces beside this checkout")


def lines(name: str) -> list[bytes]:
    raw = (FOLDER / name).read_bytes()
    return (gzip.decompress(raw) if name.endswith(".gz") else raw).splitlines()


@cache
def public_trace(name: str, block_size_tokens: int | None = None) -> Trace:
    rows = lines(name)
    return FORMATS[format_of(rows[0])].read(rows, ImportOptions(block_size_tokens=block_size_tokens))


def reference(file: str, **members: Any) -> dict[str, Any]:
    """The one row of `reference_values.json` with these members."""
    rows = json.loads((FOLDER / "reference_values.json").read_bytes())["capacity"]
    (row,) = [row for row in rows if row["file"] == file and all(row[k] == v for k, v in members.items())]
    return dict(row)
