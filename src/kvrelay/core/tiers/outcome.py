"""What became of one stored object, in the words that counters, receipts and messages use."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """Exactly one per key and operation. Only `hit` and `stored` mean that bytes may be used or are kept."""

    HIT = "hit"  # every byte verified
    MISS = "miss"  # the store answered: it is not there
    STORED = "stored"
    CORRUPT = "corrupt"  # checksum, cipher tag or head does not verify
    FOREIGN = "foreign"  # a sound object that is not the one asked for
    PARTIAL = "partial"  # shorter or longer than it says, or a group with a piece missing
    EXPIRED = "expired"
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"  # the store did not answer, or is out of use after failures
    NO_SPACE = "no_space"
    REFUSED = "refused"  # format, key id or owner that this process may not or cannot handle
    SKIPPED = "skipped"  # not tried: computing anew is quicker, or it was not wanted any more


# What says something about a store's health, and not about one object.
FAILURES = frozenset({Outcome.TIMEOUT, Outcome.UNAVAILABLE})

# What an object is when it must never be offered again; it is removed from where it was found.
DAMAGED = frozenset({Outcome.CORRUPT, Outcome.FOREIGN, Outcome.PARTIAL, Outcome.EXPIRED})
