"""What lies in one tier as far as this process knows: bytes, ages, and who leaves first.

Only a tier with a limit, a time to live or an index needs one. Bytes are counted from the moment a write is admitted,
so that writes under way cannot add up to more than the limit; what lay there before this process started counts like
the rest.
"""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.core.tiers.eviction.lfu import Lfu
from kvrelay.core.tiers.eviction.lru import Lru
from kvrelay.core.tiers.eviction.policy import EvictionPolicy
from kvrelay.core.tiers.eviction.s3fifo import S3Fifo
from kvrelay.core.tiers.eviction.ttl import Ttl
from kvrelay.core.tiers.settings import Eviction

POLICIES: dict[Eviction, Callable[[], EvictionPolicy]] = {"lru": Lru, "ttl": Ttl, "lfu": Lfu, "s3fifo": S3Fifo}


class Ledger:
    def __init__(
        self, *, capacity_bytes: int | None, ttl_s: float | None, eviction: Eviction, most_indexed: int | None = None
    ) -> None:
        """`most_indexed`: look-ups rely on it, also for a tier without limits; of so many objects at most, and then
        those that would leave last."""
        self.capacity_bytes = capacity_bytes
        self._ttl_s = ttl_s
        self._most_indexed = most_indexed
        self._keeps_track = capacity_bytes is not None or ttl_s is not None or most_indexed is not None
        self._policy = POLICIES[eviction]()
        self._stored: dict[bytes, int] = {}
        self._reserved: dict[bytes, int] = {}
        self._born: dict[bytes, float] = {}  # in order of age
        self._reserved_bytes = 0
        self.used_bytes = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._stored

    def reserves(self, key: bytes) -> bool:
        """Whether a write of it is under way, which counts its bytes already."""
        return key in self._reserved

    @property
    def objects(self) -> int:
        return len(self._stored)

    def fits(self, size: int) -> bool:
        """Whether it could lie here beside all writes under way, which cannot be evicted."""
        return self.capacity_bytes is None or self._reserved_bytes + size <= self.capacity_bytes

    def victims(self, size: int) -> list[bytes]:
        """What has to leave before `size` bytes more fit, already taken out of the books."""
        leaving: list[bytes] = []
        while self.capacity_bytes is not None and self.used_bytes + size > self.capacity_bytes:
            key = self._policy.victim()
            if key is None:
                break
            self.remove(key)
            leaving.append(key)
        return leaving

    def reserve(self, key: bytes, size: int) -> bool:
        """A write is under way; until it ends the key is nobody's victim, also if it was stored before (true)."""
        stored_before = key in self._stored
        if self._keeps_track:
            assert key not in self._reserved, "two writers of one key"
            self.remove(key)
            self._reserved[key] = size
            self._reserved_bytes += size
            self.used_bytes += size
        return stored_before

    def cancel(self, key: bytes) -> None:
        """It failed."""
        size = self._reserved.pop(key, 0)
        self._reserved_bytes -= size
        self.used_bytes -= size

    def commit(self, key: bytes, size: int, now_s: float, *, age_s: float = 0.0) -> None:
        """It lies there, since `age_s` ago."""
        if not self._keeps_track:
            return
        self.cancel(key)
        self.used_bytes += size - self._stored.pop(key, 0)
        self._stored[key] = size
        self._policy.insert(key, now_s)
        self._born.pop(key, None)
        self._born[key] = now_s - age_s
        if self._most_indexed is not None and self.capacity_bytes is None and len(self._stored) > self._most_indexed:
            forgotten = self._policy.victim()
            if forgotten is not None:
                self.remove(forgotten)

    def touch(self, key: bytes, now_s: float) -> None:
        if key in self._stored:
            self._policy.touch(key, now_s)

    def remove(self, key: bytes) -> None:
        size = self._stored.pop(key, None)
        if size is not None:
            self.used_bytes -= size
            self._policy.remove(key)
            self._born.pop(key, None)

    def expired(self, now_s: float) -> list[bytes]:
        """What has outlived the tier's time to live."""
        if self._ttl_s is None:
            return []
        old = []
        for key, born_s in self._born.items():
            if born_s + self._ttl_s > now_s:
                break
            old.append(key)
        return old

    def next_expiry_s(self) -> float | None:
        if self._ttl_s is None or not self._born:
            return None
        return next(iter(self._born.values())) + self._ttl_s

    def check(self) -> None:
        """Invariants."""
        assert self.used_bytes == sum(self._stored.values()) + sum(self._reserved.values()), "bytes do not add up"
        assert self._stored.keys() == self._born.keys(), "ages and objects differ"
        assert len(self._policy) == len(self._stored), "the policy forgot or invented an object"
        if self.capacity_bytes is not None:
            assert self.used_bytes <= self.capacity_bytes, f"{self.used_bytes} of {self.capacity_bytes} bytes"
