"""What a file does not say by itself, and its reader may be told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from msgspec import Struct

from kvrelay.core.traces.trace import TraceError

RowKind = Literal["cumulative", "delta"]
TimeUnit = Literal["ms", "s"]

Lines = Iterable[bytes]


class ImportOptions(Struct, frozen=True):
    """Each None means: it must follow from the file, or the file is refused with the question."""

    block_size_tokens: int | None = None
    rows: RowKind | None = None
    time_unit: TimeUnit | None = None
    session_gap_ms: float = 60_000.0  # between sessions of a format without absolute times
    key: bytes = b""  # for the fingerprints of request logs; the host draws one
    tokenize: Callable[[str], Sequence[int]] | None = None  # of request logs; without it lengths are estimated


class CannotExpress(Exception):
    """The trace has something that the wanted format has no way to say."""


class Written(Struct, frozen=True):
    """The rows of an export, and what was lost on the way."""

    lines: Iterable[bytes]
    notices: tuple[str, ...] = ()


def empty_file(legal: str) -> TraceError:
    return TraceError(1, "an empty file", legal)
