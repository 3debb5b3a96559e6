"""One object on its way into the tiers: sealed once per codec, in pieces where it is larger than an object may be."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec
from msgspec import structs

from kvrelay.core.tiers.header import MANIFEST, PIECE, ObjectHeader
from kvrelay.core.tiers.manifest import Manifest, piece_name, split
from kvrelay.core.tiers.outcome import Outcome
from kvrelay.edge.stores.codecs import RAW
from kvrelay.edge.stores.keys import KeyRing
from kvrelay.edge.stores.object import Owner, seal
from kvrelay.edge.stores.store import Buffer


class Writing:
    """Parts to write for every tier and piece. The caller's buffers are used where they lie until the save is over."""

    def __init__(
        self,
        name: bytes,
        header: ObjectHeader,
        parts: Sequence[Buffer],
        *,
        owner: Owner,
        ring: KeyRing,
        codecs: Sequence[str],
        piece_bytes: int,
    ) -> None:
        self._name, self._header, self._payload = name, header, parts
        self._owner, self._ring, self._codecs = owner, ring, codecs
        self._sizes = split(header.plain_bytes, piece_bytes)
        self._sealed: dict[tuple[str, int], list[Buffer]] = {}
        self._kept: dict[int, int | None] = {}
        self._lock = threading.Lock()

    @property
    def pieces(self) -> int:
        return len(self._sizes)

    def key(self, piece: int) -> bytes:
        """The name in the store; the manifest, which comes last, has the chunk's own."""
        return self._name if self.pieces == 1 or piece == self.pieces else piece_name(self._name, piece)

    def parts(self, tier: int, piece: int) -> list[Buffer]:
        """The object as it goes to that tier."""
        codec = self._codecs[tier]
        with self._lock:
            made = self._sealed.get((codec, piece))
            if made is None:
                made = self._sealed[codec, piece] = self._seal(codec, piece)
            return made

    def written(self, tier: int, stored_bytes: int | None) -> None:
        """The store took the object; None: it had one of that name."""
        self._kept[tier] = stored_bytes

    def judge(self, tier: int, kept_bytes: int | None) -> Outcome:
        """Does the tier keep what was written?"""
        wanted = self._kept.get(tier)
        if kept_bytes is None:
            return Outcome.PARTIAL if wanted is not None else Outcome.MISS
        return Outcome.HIT if wanted in (None, kept_bytes) else Outcome.PARTIAL

    def _seal(self, codec: str, piece: int) -> list[Buffer]:
        header, payload = structs.replace(self._header, codec=codec), self._payload
        if self.pieces > 1:
            if piece == self.pieces:
                payload = [msgspec.msgpack.encode(Manifest(self._sizes))]
                header = structs.replace(
                    header, role=MANIFEST, piece=self.pieces, codec=RAW, plain_bytes=len(payload[0])
                )
            else:
                start = sum(self._sizes[:piece])
                payload = cut(self._payload, start, self._sizes[piece])
                header = structs.replace(header, role=PIECE, piece=piece, plain_bytes=self._sizes[piece])
        return seal(header, payload, ring=self._ring, owner=self._owner)


def cut(parts: Sequence[Buffer], start: int, size: int) -> list[memoryview]:
    """`size` bytes of the concatenation of the parts from `start`, without copying."""
    found: list[memoryview] = []
    for part in parts:
        view = memoryview(part).cast("B")
        if start < view.nbytes and size > 0:
            found.append(view[start : start + size])
            size -= found[-1].nbytes
        start = max(0, start - view.nbytes)
    return found
