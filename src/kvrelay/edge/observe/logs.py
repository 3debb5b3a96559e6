"""Log lines on stderr: one line per event, greppable, the same on a terminal and in a collector.

Nothing here sees a request body. Callers log worker names, counts and reasons; a line break in a value (from a
worker's answer, say) is escaped, so that nobody else writes our lines.
"""

from __future__ import annotations

import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import TextIO

ROOT = "kvrelay"
_ESCAPES = str.maketrans({"\n": "\\n", "\r": "\\r", "\x1b": "\\x1b"})


class LineFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.000Z WARNING fleet.watch message`; a label (of a process, say) comes before the name."""

    def __init__(self, label: str = "") -> None:
        super().__init__()
        self._label = f"{label} " if label else ""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        name = record.name.removeprefix(f"{ROOT}.").removeprefix("edge.")
        line = f"{moment} {record.levelname} {self._label}{name} {record.getMessage()}"
        if record.exc_info and record.exc_info[1] is not None:
            line += _where(record.exc_info[1])
        return line.translate(_ESCAPES)


def log_to(stream: TextIO | None = None, level: str = "INFO", *, label: str = "") -> None:
    """Sends our log lines to `stream` (stderr); may be called again, the last call counts."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(label))
    logger = logging.getLogger(ROOT)
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(level)


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    at = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f" error={type(error).__name__}: {error}{at}"
