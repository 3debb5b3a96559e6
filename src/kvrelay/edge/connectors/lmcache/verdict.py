"""What becomes of one field of an LMCache configuration here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

Fate = Literal["taken", "not needed", "refused"]


class Verdict(Struct, frozen=True, omit_defaults=True):
    """`becomes`: the setting that it turns into. `reason`: what that means, why it is not needed, or why it is refused
    and what to do instead."""

    field: str
    value: Any
    fate: Fate
    reason: str
    becomes: str | None = None


class Host(Struct, frozen=True, kw_only=True):
    """The machine that the configuration is for. Sizes in GiB, as LMCache counts what it calls GB."""

    memory_gib: float
    engine_gib: float  # host memory of one engine process, without any cache
    buffer_gib: float  # left to the operating system, page cache and peaks
    workers: int = 1  # engine processes on it, each of which has a cache of its own size

    @property
    def room_gib(self) -> float:
        """What all caches together may take."""
        return self.memory_gib - self.workers * self.engine_gib - self.buffer_gib


class Reading(Struct, frozen=True):
    """The whole configuration, field by field, and what it comes down to when nothing is refused."""

    verdicts: tuple[Verdict, ...]
    store: Mapping[str, Any]  # as the section [store]
    connector: Mapping[str, Any]  # for kv_connector_extra_config

    @property
    def refused(self) -> tuple[Verdict, ...]:
        return tuple(verdict for verdict in self.verdicts if verdict.fate == "refused")
