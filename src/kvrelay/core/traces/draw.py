"""Chance as an argument: numbers that follow from a seed and a name, the same on every machine, in every version."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


class Draw:
    """One stream per concern: adding a draw to one of them shifts nothing in another."""

    def __init__(self, seed: int, concern: str) -> None:
        self._prefix = f"{seed}\0{concern}\0"

    def unit(self, number: int) -> float:
        """Evenly in [0, 1), the same for the same number."""
        digest = hashlib.blake2b(f"{self._prefix}{number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") / (1 << 64)

    def between(self, number: int, low: int, high: int) -> int:
        """Evenly, both ends included."""
        return low + int(self.unit(number) * (high - low + 1))

    def gap_ms(self, number: int, *, per_second: float) -> float:
        """Between two arrivals of a Poisson process."""
        return -math.log(1.0 - self.unit(number)) / per_second * 1000

    def shuffled(self, items: Sequence[Item]) -> list[Item]:
        order = sorted(range(len(items)), key=self.unit)
        return [items[index] for index in order]
