"""The real clocks. Durations and deadlines come from the monotonic one; only people and files see wall time."""

from __future__ import annotations

import time
from datetime import UTC, datetime

monotonic_s = time.monotonic
"""Seconds of this host's monotonic clock; comparable between processes of one host, not between hosts. Itself and not
a function around it: it is asked several times per request."""


def wall_s() -> float:
    """Seconds since the epoch, for metrics that other machines compare."""
    return time.time()


def wall_ns() -> int:
    """The same in whole nanoseconds, for traces."""
    return time.time_ns()


def wall_time() -> str:
    """Now in UTC, ISO 8601 with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
