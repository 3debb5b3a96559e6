"""A lock says that a gate file had these bytes at that time. It stands beside the file and goes into every run.

It is a note and not a proof: who can write the file can write the lock. What makes it worth something is that the run
keeps both, and that `locked_at` of a lock which was published elsewhere (a commit, a ticket) can be compared.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from kvrelay.core.gates.evidence import Registration


class GateLock(Struct, frozen=True):
    """`locked_at_s` is seconds since 1970 in UTC, `locked_at` the same for people."""

    sha256: str
    locked_at_s: float
    locked_at: str
    kvrelay: str


class LockUnreadable(Exception):
    """The file beside the gates is no lock."""


def parse_lock(text: bytes) -> GateLock:
    try:
        return msgspec.json.decode(text, type=GateLock)
    except msgspec.DecodeError as problem:
        raise LockUnreadable(str(problem)) from problem


def registration(digest: str, lock: GateLock | None, *, first_request_s: float) -> Registration:
    """Of gates with this digest, for a run whose first request left at `first_request_s`."""
    if lock is None:
        return Registration.UNLOCKED
    if lock.sha256 != digest:
        return Registration.CHANGED
    return Registration.REGISTERED if lock.locked_at_s < first_request_s else Registration.LATE
