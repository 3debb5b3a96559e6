"""Where `kvrelay receipts` reads from: a file, perhaps one that is being written, or a running gateway."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from kvrelay.cli import messages
from kvrelay.cli.admin_client import AdminClient
from kvrelay.core.receipts.receipt import Receipt
from kvrelay.edge.observe.receipt_file import BadReceipt, parse_receipt, read_receipts

FOLLOW_EVERY_S = 0.3
FOLLOW_LIMIT = 1000  # as many as a gateway keeps; beyond that many between two looks, some are missed


def tail_file(file: Path, lines: int, follow: bool) -> Iterator[Receipt]:
    """The last receipts, oldest first, and then new ones as they come. Raises OSError or BadReceipt."""
    opened = file.open("rb")
    try:
        last = deque(_whole_lines(opened), maxlen=lines)
        while True:
            for line in last:
                yield parse_receipt(line, str(file))
            if not follow:
                return
            time.sleep(FOLLOW_EVERY_S)
            rotated = _is_another_file(file, opened)  # asked first: what is read now was written before
            last = deque(_whole_lines(opened))
            if rotated:
                opened.close()
                opened = file.open("rb")
    finally:
        opened.close()


def _whole_lines(opened: BinaryIO) -> Iterator[bytes]:
    """To the end; a last line without its end is still being written and is left for later."""
    while (line := opened.readline()).endswith(b"\n"):
        yield line
    opened.seek(-len(line), os.SEEK_CUR)


def _is_another_file(file: Path, opened: BinaryIO) -> bool:
    try:
        return file.stat().st_ino != os.fstat(opened.fileno()).st_ino
    except FileNotFoundError:
        return False  # between two steps of a rotation


def tail_router(client: AdminClient, lines: int, follow: bool) -> Iterator[Receipt]:
    """The same from a gateway. Raises AdminUnavailable."""
    seen: dict[str, None] = {}
    limit = lines
    while True:
        newest_first = client.receipts(limit) if limit else []
        for receipt in reversed(newest_first):
            if receipt.request_id not in seen:
                seen[receipt.request_id] = None
                yield receipt
        if not follow:
            return
        while len(seen) > 2 * FOLLOW_LIMIT:
            del seen[next(iter(seen))]
        limit = FOLLOW_LIMIT
        time.sleep(FOLLOW_EVERY_S)


def find_receipt(target: str, file: Path | None, client: AdminClient | None) -> Receipt:
    """The receipt at FILE:LINE or with this request id; ends the process with a message when there is none."""
    path, _, line = target.rpartition(":")
    if path and line.isdigit() and Path(path).is_file():
        return _at_line(Path(path), int(line))
    if file is not None:
        found = next((receipt for receipt in read_receipts(file) if receipt.request_id == target), None)
        absent = messages.receipt_not_in_file(target, file=file)
    elif client is not None:
        found = client.receipt(target)
        absent = messages.receipt_not_in_memory(target, router=client.url)
    else:
        messages.fail(messages.no_receipt_source())
    if found is None:
        messages.fail(absent)
    return found


def _at_line(file: Path, number: int) -> Receipt:
    with file.open("rb") as opened:
        for at, line in enumerate(opened, start=1):
            if at == number:
                return parse_receipt(line, f"{file}:{number}")
    raise BadReceipt(f"{file} has no line {number}")
