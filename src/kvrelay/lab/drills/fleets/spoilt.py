"""A store whose readers are shown something else than what lies there. What was written stays whole: a drill that mends
it has the same objects as before."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

from kvrelay.edge.stores.memory import MemoryStore, fill
from kvrelay.edge.stores.store import Buffer
from kvrelay.edge.stores.wrappers import Wrapped

SCAN_DEADLINE_S = 5.0


class SpoiltStore(Wrapped):
    """`how`: None, `truncated` (half of each object), `damaged` (one bit, of the byte at `damage_at` of its length),
    `phantom` (known, and not there), `foreign` (one that lies under another name); one read in `every`. Reads are
    counted by whoever knows when they begin and end."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.how: str | None = None
        self.damage_at = 1.0
        self.every = 1
        self.reads: Counter[bytes] = Counter()
        self.most_reads_at_once = 0
        self._running = 0
        self._reads_to_spoil = 0
        self._counting = threading.Lock()

    def read(self, key: bytes, *, deadline_s: float) -> Buffer | None:
        found = self.inner.read(key, deadline_s=deadline_s)
        if found is None or self.how is None:
            return found
        self._reads_to_spoil += 1
        return found if self._reads_to_spoil % self.every else self._spoilt(key, bytearray(found))

    def read_into(self, key: bytes, parts: Sequence[memoryview], *, deadline_s: float) -> int | None:
        found = self.read(key, deadline_s=deadline_s)
        if found is None:
            return None
        fill(parts, memoryview(found).cast("B"))
        return len(found)

    def read_begins(self, key: bytes) -> Callable[[], None]:
        """Call what is returned when it ends."""
        with self._counting:
            self.reads[key] += 1
            self._running += 1
            self.most_reads_at_once = max(self.most_reads_at_once, self._running)
        return self._read_ends

    def wipe(self) -> None:
        self.inner = MemoryStore()

    def begin_counting(self) -> None:
        with self._counting:
            self.reads.clear()
            self.most_reads_at_once = 0

    def figures(self) -> dict[str, int]:
        """For the history."""
        return {
            "objects": sum(1 for _ in self.inner.scan(deadline_s=SCAN_DEADLINE_S)),
            "most_reads_at_once": self.most_reads_at_once,
            "reads": sum(self.reads.values()),
            "most_reads_of_one": max(self.reads.values(), default=0),
        }

    def _read_ends(self) -> None:
        with self._counting:
            self._running -= 1

    def _spoilt(self, key: bytes, content: bytearray) -> Buffer | None:
        match self.how:
            case "truncated":
                return content[: len(content) // 2]
            case "damaged":
                content[min(len(content) - 1, int(self.damage_at * len(content)))] ^= 1
                return content
            case "phantom":
                return None
            case "foreign":
                others = [info.key for info in self.inner.scan(deadline_s=SCAN_DEADLINE_S) if info.key != key]
                other = others[self._reads_to_spoil % len(others)] if others else key
                return self.inner.read(other, deadline_s=SCAN_DEADLINE_S)
        raise AssertionError(f"no such damage: {self.how}")
