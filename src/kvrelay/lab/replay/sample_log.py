"""Samples on disk: one JSON line each, written as the request ends. A crash in arm three costs arm three only."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec

from kvrelay.lab.replay.sample import Sample


class SampleLog:
    """A new file; every line is with the operating system when `write` returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._encode = msgspec.json.Encoder().encode
        self._file: BinaryIO | None = None

    def __enter__(self) -> SampleLog:
        self._file = self._path.open("wb", buffering=0)
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        assert self._file is not None
        self._file.close()

    def write(self, sample: Sample) -> None:
        assert self._file is not None, "the log is not open"
        self._file.write(self._encode(sample) + b"\n")


def read_samples(path: Path) -> tuple[Sample, ...]:
    """Raises OSError or msgspec.DecodeError. A last line that a crash cut off is left out, as it was never measured."""
    lines = path.read_bytes().split(b"\n")
    decoder = msgspec.json.Decoder(Sample)
    return tuple(decoder.decode(line) for line in lines[:-1] if line)
