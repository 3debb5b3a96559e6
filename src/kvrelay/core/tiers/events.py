"""What happens to the tiers. Look-ups, loads, saves and removals are numbered by the host, jobs by the machine."""

from __future__ import annotations

from msgspec import Struct

from kvrelay.core.tiers.outcome import Outcome


class LookupAsked(Struct, frozen=True):
    """How many leading chunks could be loaded? All have the same size."""

    lookup: int
    keys: tuple[bytes, ...]
    chunk_bytes: int
    chunk_tokens: int
    deadline_s: float


class Probed(Struct, frozen=True):
    """A tier said which keys it has, or (`present` is None) why it did not."""

    job: int
    present: tuple[bool, ...] | None
    outcome: Outcome = Outcome.HIT


class LoadAsked(Struct, frozen=True):
    """Bring these chunks; `places` are the tiers that may have each, best first."""

    load: int
    keys: tuple[bytes, ...]
    places: tuple[tuple[int, ...], ...]
    deadline_s: float


class Fetched(Struct, frozen=True):
    """A fetch is over and its bytes are verified, or are not to be used; `skipped`: nobody wanted them any more."""

    job: int
    outcome: Outcome
    moved_bytes: int = 0


class SaveAsked(Struct, frozen=True):
    """Keep an object of `stored_bytes`; the host holds its bytes until `SaveFinished`. `pieces` above 1: it is written
    in so many parts, and counts only when a manifest over all of them is there."""

    save: int
    key: bytes
    stored_bytes: int
    pieces: int = 1


class Written(Struct, frozen=True):
    """A write returned. `existed`: the object was there already."""

    job: int
    outcome: Outcome
    existed: bool = False


class Checked(Struct, frozen=True):
    """`hit`: the tier says that it keeps the object in its full length. Anything else: it does not, or did not
    answer."""

    job: int
    outcome: Outcome


class RemovalAsked(Struct, frozen=True):
    """Delete these keys everywhere; `why` goes into the audit record."""

    removal: int
    keys: tuple[bytes, ...]
    why: str


class Removed(Struct, frozen=True):
    """A tier deleted, or did not answer."""

    job: int
    count: int
    outcome: Outcome = Outcome.HIT


class Pinged(Struct, frozen=True):
    """A tier out of use was asked whether it is back."""

    job: int
    answered: bool


class WarmAsked(Struct, frozen=True):
    """Bring these keys into the nearest tier in the background, hottest first."""

    keys: tuple[bytes, ...]
    chunk_bytes: int


class Transferred(Struct, frozen=True):
    """A copy from tier to tier is over."""

    job: int
    outcome: Outcome
    stored_bytes: int = 0


class ObjectsFound(Struct, frozen=True):
    """What lies in a tier: key, stored bytes, age in seconds; oldest first. `late`: not for the first time, so that
    what is new was written by somebody whose word of it did not come here."""

    tier: int
    objects: tuple[tuple[bytes, int, float], ...]
    late: bool = False


class PrefillSeen(Struct, frozen=True):
    """The engine computed so many tokens in that time."""

    tokens: int
    seconds: float


class FetchSeen(Struct, frozen=True):
    """Another process that uses the same tiers, and tells us, fetched so many bytes from one of them in that time."""

    tier: int
    fetched_bytes: int
    seconds: float


class Woke(Struct, frozen=True):
    """The time of the last `WakeAt` has come."""


TierEvent = (
    LookupAsked
    | Probed
    | LoadAsked
    | Fetched
    | SaveAsked
    | Written
    | Checked
    | RemovalAsked
    | Removed
    | Pinged
    | WarmAsked
    | Transferred
    | ObjectsFound
    | PrefillSeen
    | FetchSeen
    | Woke
)
