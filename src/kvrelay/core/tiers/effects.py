"""What the tiers ask of their host. Everything with a `job` is answered once, by the event named in its text."""

from __future__ import annotations

from msgspec import Struct

from kvrelay.core.tiers.breakeven import BreakEven
from kvrelay.core.tiers.outcome import Outcome


class Probe(Struct, frozen=True):
    """-> Probed."""

    job: int
    tier: int
    keys: tuple[bytes, ...]
    deadline_s: float


class LookupAnswered(Struct, frozen=True):
    """`places[i]`: tiers that said they have the i-th of the leading chunks, nearest first. `unasked`: tiers out of use
    or silent."""

    lookup: int
    places: tuple[tuple[int, ...], ...]
    verdict: BreakEven
    unasked: tuple[int, ...]


class Fetch(Struct, frozen=True):
    """-> Fetched, when verified and in the destination of `load` at `position`. `load` None: only to measure.
    `keep`: hold the stored object, a `Transfer` may follow."""

    job: int
    tier: int
    key: bytes
    load: int | None
    position: int
    deadline_s: float
    keep: bool = False


class Copy(Struct, frozen=True):
    """Somebody else waited for the same fetch: copy from one load's destination to the other's, before the next
    step."""

    source_load: int
    source_position: int
    load: int
    position: int


class LoadFinished(Struct, frozen=True):
    """The end of a load: one outcome per key, in its order. From now on its destinations are not written to."""

    load: int
    outcomes: tuple[Outcome, ...]
    failed: bool  # the policy is `fail` and something was not there as promised
    bytes_by_tier: tuple[int, ...]
    seconds_by_tier: tuple[float, ...]
    found_in: tuple[int | None, ...]  # per key: the tier that a `hit` came from


class Write(Struct, frozen=True):
    """-> Written. The bytes are those of `save`; `piece` counts from 0, the manifest is piece `pieces`."""

    job: int
    tier: int
    key: bytes
    save: int
    piece: int
    deadline_s: float


class Check(Struct, frozen=True):
    """-> Checked: did the tier keep every byte of piece `piece`?"""

    job: int
    tier: int
    key: bytes
    save: int
    piece: int
    deadline_s: float


class Announce(Struct, frozen=True):
    """The object is complete in that tier and may be told to others."""

    tier: int
    key: bytes
    stored_bytes: int


class SaveFinished(Struct, frozen=True):
    """The end of a save, one outcome per tier (`skipped` where the write policy left it out)."""

    save: int
    outcomes: tuple[Outcome, ...]


class Remove(Struct, frozen=True):
    """-> Removed. Delete the keys with all pieces they may have."""

    job: int
    tier: int
    keys: tuple[bytes, ...]
    why: str
    deadline_s: float


class RemovalFinished(Struct, frozen=True):
    """What each tier deleted; None: it has not answered, and is asked again when it does."""

    removal: int
    counts: tuple[int | None, ...]


class Transfer(Struct, frozen=True):
    """-> Transferred. Copy a stored object as it is, after checking it, in the background."""

    job: int
    source: int
    target: int
    key: bytes
    deadline_s: float


class Ping(Struct, frozen=True):
    """-> Pinged."""

    job: int
    tier: int
    deadline_s: float


class TierStateChanged(Struct, frozen=True):
    """A tier went out of use or came back."""

    tier: int
    in_use: bool


class WakeAt(Struct, frozen=True):
    """Send `Woke` then; replaces any earlier one."""

    at_s: float


TierEffect = (
    Probe
    | LookupAnswered
    | Fetch
    | Copy
    | LoadFinished
    | Write
    | Check
    | Announce
    | SaveFinished
    | Remove
    | RemovalFinished
    | Transfer
    | Ping
    | TierStateChanged
    | WakeAt
)
