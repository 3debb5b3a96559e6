"""Identities. A worker is named by its operator; an incarnation is one life of its process."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct


class WorkerId(Struct, frozen=True, order=True):
    """One life of one worker. Two lives of a worker share `name` and nothing else."""

    name: str
    incarnation: str

    def __str__(self) -> str:
        return f"{self.name}@{self.incarnation}"


class SessionKey(NamedTuple):
    """A session id is the client's word, and two tenants may say the same one: it means something per tenant."""

    session_id: str
    tenant: str = "default"


class TargetId(Struct, frozen=True, order=True):
    """One data-parallel rank of a worker: the smallest thing that holds blocks and can be sent to."""

    worker: WorkerId
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.worker}/{self.rank}"
