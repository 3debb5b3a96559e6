"""One measured number with what it may be and what the rig itself could reach."""

from __future__ import annotations

from msgspec import Struct


class Figure(Struct, frozen=True):
    """`limit` is the most that it may be; `ceiling` is the same thing without our code in between."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    ceiling: float | None = None
    ceiling_name: str | None = None

    @property
    def ok(self) -> bool | None:
        """None: no limit was stated."""
        return None if self.limit is None else self.value <= self.limit
