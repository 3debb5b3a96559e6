"""How far a hit came: from this engine's own cache, another process of this host, another host's memory, or from what
outlives all of them. The medium (`core/model/units.py`) says what bytes lie on, this says who shares them.
"""

from __future__ import annotations

from enum import StrEnum
from urllib.parse import urlsplit


class Scope(StrEnum):
    ENGINE = "engine"
    HOST = "host"
    CLUSTER = "cluster"
    PERSISTENT = "persistent"


_OTHERS = {"file": Scope.PERSISTENT, "s3": Scope.PERSISTENT}


def scope_of(url: str) -> Scope:
    """Of a tier, by its URL. A directory may be a local disk or one that hosts share: it survives in either case."""
    parts = urlsplit(url)
    if parts.scheme == "memory":
        return Scope.HOST if parts.netloc else Scope.ENGINE
    return _OTHERS.get(parts.scheme, Scope.CLUSTER)
