"""Writes rows to a file or to standard output, packed when the name says so."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Iterable
from pathlib import Path

STDOUT = Path("-")


def write_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Raises OSError. The same lines give the same bytes, packed or not (a gzip header would hold the time)."""
    if path == STDOUT:
        for line in lines:
            sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.flush()
        return
    with path.open("wb") as file:
        if path.suffix == ".gz":
            with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed:
                packed.writelines(line + b"\n" for line in lines)
        else:
            file.writelines(line + b"\n" for line in lines)
