"""Receipts as JSON lines, written beside the request path.

`write` only encodes and appends to memory; a thread of its own does the file work in batches, so a slow disk never
delays a request. The memory between the two is bounded: when the disk cannot keep up, receipts are dropped, counted
and said, which is better than an ever growing process. The last receipts stay readable in memory either way, as encoded
lines: a thousand receipts as objects are a hundred thousand things for the garbage collector to walk.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec

from kvrelay.core.receipts.receipt import Receipt

BATCH_S = 0.05  # longest time that a receipt waits for company on its way to the file
MAX_PENDING_BYTES = 64 * 2**20
DEFAULT_RECENT = 1000

_log = logging.getLogger(__name__)


class LineWriter(Protocol):
    """Where lines go for good. `lost` counts those that were taken and could not be written."""

    lost: int

    def put(self, line: bytes) -> bool:
        """False: there is no room, the line was not taken."""
        ...

    def flush(self) -> None:
        """Waits until everything put so far has arrived."""
        ...

    def close(self) -> None:
        """Nothing is put after this; may be called again."""
        ...


def receipt_file(path: Path, *, rotate_mb: int, keep: int) -> LineWriter:
    """A rotated file with a thread of its own. Raises OSError."""
    return _Writer(_RotatedFile(path, rotate_mb * 2**20, keep))


class ReceiptLog:
    """`writer=None` keeps the last `recent` receipts in memory only."""

    def __init__(self, writer: LineWriter | None = None, *, recent: int = DEFAULT_RECENT) -> None:
        self._refused = 0
        self._encoder = msgspec.json.Encoder()
        self._decoder = msgspec.json.Decoder(Receipt)
        self._recent: dict[str, bytes] = {}  # oldest first
        self._max_recent = recent
        self._writer = writer

    @property
    def dropped(self) -> int:
        """Receipts that are in no file and should be: there was no room for them, before the writer or on the disk."""
        return self._refused + (0 if self._writer is None else self._writer.lost)

    def write(self, receipt: Receipt) -> None:
        line = self._encoder.encode(receipt)
        self._recent.pop(receipt.request_id, None)
        self._recent[receipt.request_id] = line
        if len(self._recent) > self._max_recent:
            del self._recent[next(iter(self._recent))]
        if self._writer is not None and not self._writer.put(line + b"\n"):
            self._refused += 1
            if self._refused == 1 or self._refused % 1000 == 0:
                _log.error("receipts dropped: the disk does not keep up; dropped=%d", self._refused)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._recent

    def get(self, request_id: str) -> Receipt | None:
        """The receipt, if it is among the last ones."""
        line = self._recent.get(request_id)
        return None if line is None else self._decoder.decode(line)

    def recent_lines(self, limit: int) -> list[bytes]:
        """The same, as they were encoded."""
        return list(islice(reversed(self._recent.values()), limit))

    def recent(self, limit: int) -> list[Receipt]:
        """The last receipts, newest first."""
        return [self._decoder.decode(line) for line in islice(reversed(self._recent.values()), limit)]

    def flush(self) -> None:
        """Waits until everything written so far is in the file."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Writes what is pending and ends; may be called again."""
        if self._writer is not None:
            self._writer.close()


class _Writer:
    """The thread, and the bounded memory in front of it."""

    def __init__(self, file: _RotatedFile) -> None:
        self._file = file
        self.lost = 0
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._busy = False
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="receipt-log", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> bool:
        """False: there is no room, the line was not taken."""
        with self._changed:
            if self._closing or self._pending_bytes + len(line) > MAX_PENDING_BYTES:
                return False
            first = not self._pending
            self._pending.append(line)
            self._pending_bytes += len(line)
            if first:
                self._changed.notify_all()
        return True

    def flush(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._pending and not self._busy)

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closing)
                if not self._closing:
                    self._changed.wait_for(lambda: self._closing, timeout=BATCH_S)
                batch, self._pending, self._pending_bytes = self._pending, [], 0
                closing = self._closing
                self._busy = True
            self._write(batch)
            with self._changed:
                self._busy = False
                self._changed.notify_all()
            if closing:
                self._file.close()
                return

    def _write(self, batch: list[bytes]) -> None:
        try:
            self._file.append(batch)
        except OSError as error:
            self.lost += len(batch)
            _log.error("receipts lost: %s; count=%d", error, len(batch))


class _RotatedFile:
    """`receipts.jsonl`, and before it `receipts.jsonl.1` (newest) to `.N`. An error does not end its usefulness."""

    def __init__(self, path: Path, rotate_bytes: int, keep: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._rotate_bytes = rotate_bytes
        self._keep = keep
        self._open()

    def append(self, lines: list[bytes]) -> None:
        """Raises OSError; what was not written then is lost, but no line is ever half in the file."""
        if self._file.closed:  # a rotation failed half-way
            self._open()
        part: list[bytes] = []
        size_bytes = self._size_bytes
        for line in lines:
            if size_bytes + len(line) > self._rotate_bytes and size_bytes > 0:
                self._write(part)
                self._rotate()
                part, size_bytes = [], 0
            part.append(line)
            size_bytes += len(line)
        self._write(part)

    def close(self) -> None:
        self._file.close()

    def _open(self) -> None:
        self._file: BinaryIO = self._path.open("ab", buffering=0)
        self._size_bytes = self._path.stat().st_size

    def _write(self, lines: list[bytes]) -> None:
        """A full disk may take a part of what it is given; that part goes again."""
        data = memoryview(b"".join(lines))
        end_bytes = self._size_bytes + len(data)
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError:
            with suppress(OSError):
                self._file.truncate(self._size_bytes)
            raise
        self._size_bytes = end_bytes

    def _rotate(self) -> None:
        self._file.close()
        self._numbered(self._keep).unlink(missing_ok=True)
        for number in range(self._keep - 1, -1, -1):
            if self._numbered(number).exists():
                self._numbered(number).rename(self._numbered(number + 1))
        self._open()

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}") if number else self._path
