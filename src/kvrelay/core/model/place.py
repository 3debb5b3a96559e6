"""How far a worker is from the gateway: same host, rack or zone, or beyond. Stated by the operator, not measured."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class Hop(StrEnum):
    """Closed vocabulary of `candidates[].hop` in receipts, the nearest first."""

    HOST = "host"
    RACK = "rack"
    ZONE = "zone"
    BEYOND = "beyond"  # another zone
    UNKNOWN = "unknown"  # one of the two did not say where it is


class Place(Struct, frozen=True):
    """Where somebody is; None where it was not said. Racks are only compared within one zone."""

    host: str | None = None
    rack: str | None = None
    zone: str | None = None


class HopCosts(Struct, frozen=True):
    """What the way there and back adds to a first token, in milliseconds. What is unknown costs nothing, as `HOST`."""

    rack_ms: float = 0.1
    zone_ms: float = 1.0
    beyond_ms: float = 20.0

    def of(self, hop: Hop) -> float:
        match hop:
            case Hop.RACK:
                return self.rack_ms
            case Hop.ZONE:
                return self.zone_ms
            case Hop.BEYOND:
                return self.beyond_ms
            case _:
                return 0.0


def hop_between(here: Place, there: Place) -> Hop:
    """How far one is from the other."""
    if here.host is not None and here.host == there.host:
        return Hop.HOST
    if here.zone is None or there.zone is None:
        return Hop.UNKNOWN
    if here.zone != there.zone:
        return Hop.BEYOND
    return Hop.RACK if here.rack is not None and here.rack == there.rack else Hop.ZONE
