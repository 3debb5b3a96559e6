"""Reading one object: the head, the verdict, and the payload into its destination by the shortest way.

Where a payload is stored as it is, the store fills the destination itself and the bytes are verified there, and
decrypted there if they are encrypted; packed ones are read whole. A store that may hang regardless of deadlines never
sees the destination.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct, structs

from kvrelay.core.tiers.header import MANIFEST, PIECE, WHOLE, Expected
from kvrelay.core.tiers.manifest import Manifest, piece_name
from kvrelay.core.tiers.outcome import Outcome
from kvrelay.edge.stores.buffers import Writer
from kvrelay.edge.stores.ciphers import TAG_BYTES
from kvrelay.edge.stores.codecs import RAW
from kvrelay.edge.stores.keys import KeyRing
from kvrelay.edge.stores.object import HEAD_BYTES, Head, Owner, Verdict, check_payload, parse_head, unpack
from kvrelay.edge.stores.store import (
    Buffer,
    NoSpace,
    Store,
    StoreError,
    StoreTimeout,
    WriteOutcome,
    total_bytes,
)

_MOST_KEPT = 16
_MAX_MANIFEST = 65_536  # bytes; a manifest that claims to be larger is none


class Wanted(Struct, frozen=True):
    """One object as a reader wants it. `name` is its name in the store."""

    name: bytes
    expected: Expected
    owner: Owner


class Reader:
    """Reads objects of one store."""

    def __init__(
        self,
        store: Store,
        *,
        ring: KeyRing,
        codec: str,
        piece_bytes: int,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._wall_s = wall_s
        self._piece_bytes = piece_bytes
        self.most_pieces = 0  # that any chunk had which this process wrote or read
        self._ring = ring
        self._codec = codec
        self._kept: dict[bytes, Buffer] = {}
        self.last_refusal = ""

    def fetch(self, wanted: Wanted, writer: Writer, *, deadline_s: float, keep: bool) -> tuple[Outcome, int]:
        """Fetch into the writer's destination, entered as late as the store allows. Raises nothing of its own.

        `keep`: a `transfer` of the same object is likely to follow, and need not read it again."""
        try:
            if self._store.bounded and self._codec == RAW and not keep:
                into = writer.enter()
                return (Outcome.SKIPPED, 0) if into is None else self._direct(wanted, into, deadline_s)
            until_s = time.monotonic() + deadline_s
            data = self._store.read(wanted.name, deadline_s=deadline_s)
            if keep and data is not None:
                self._keep(wanted.name, data)
            into = writer.enter()
            return (Outcome.SKIPPED, 0) if into is None else self._unpacked(wanted, data, into, until_s)
        except StoreError as error:
            return _outcome_of(error), 0

    def measure(self, name: bytes, *, deadline_s: float) -> tuple[Outcome, int]:
        """Fetch and throw away: how long does it take?"""
        try:
            data = self._store.read(name, deadline_s=deadline_s)
        except StoreError as error:
            return _outcome_of(error), 0
        return (Outcome.MISS, 0) if data is None else (Outcome.HIT, memoryview(data).nbytes)

    def delete_all(self, names: Sequence[bytes], *, deadline_s: float) -> int:
        """Delete chunks with the pieces that they have or may have; how many chunks there were."""
        gone = self._store.delete(names, deadline_s=deadline_s)
        if self.most_pieces:
            pieces = [piece_name(name, i) for name in names for i in range(self.most_pieces)]
            self._store.delete(pieces, deadline_s=deadline_s)
        return gone

    def transfer(self, name: bytes, target: Store, *, ttl_s: float | None, deadline_s: float) -> tuple[Outcome, int]:
        """Copy a stored object as it is to another store, if it is sound, and see that it keeps every byte; its stored
        bytes."""
        until_s = time.monotonic() + deadline_s
        data = self._kept.pop(name, None) or self._store.read(name, deadline_s=deadline_s)
        head = parse_head(_view(data)) if data is not None else Verdict(Outcome.MISS)
        if isinstance(head, Verdict):
            return head.outcome, 0
        verdict = check_payload(head, _view(data)[HEAD_BYTES:])
        if verdict.outcome is not Outcome.HIT:
            return verdict.outcome, 0
        moved = 0
        if head.header.role == MANIFEST:
            for i in range(head.header.piece):
                outcome, size = self.transfer(piece_name(name, i), target, ttl_s=ttl_s, deadline_s=_left(until_s))
                if outcome is not Outcome.STORED:
                    return Outcome.PARTIAL, 0
                moved += size
        size = _view(data).nbytes
        done = target.write(name, [_view(data)], only_if_absent=True, deadline_s=_left(until_s), ttl_s=ttl_s)
        if done is WriteOutcome.WRITTEN and target.sizes([name], deadline_s=_left(until_s)) != [size]:
            target.delete([name], deadline_s=_left(until_s))
            return Outcome.PARTIAL, 0
        return Outcome.STORED, moved + size

    def _keep(self, name: bytes, data: Buffer) -> None:
        """Few, and not for long: whoever wants them asks at once."""
        self._kept[name] = data
        while len(self._kept) > _MOST_KEPT:
            self._kept.pop(next(iter(self._kept)), None)

    # --- parts -------------------------------------------------------------------------------------------------------

    def _direct(self, wanted: Wanted, into: memoryview, deadline_s: float) -> tuple[Outcome, int]:
        """Straight into the destination; what is encrypted is decrypted there."""
        if into.nbytes > self._piece_bytes:
            return self._whole(wanted, into, deadline_s)
        head = memoryview(bytearray(HEAD_BYTES))
        tag = memoryview(bytearray(TAG_BYTES)) if self._ring.encrypts else None
        parts = (head, into) if tag is None else (head, into, tag)
        size = self._store.read_into(wanted.name, parts, deadline_s=deadline_s)
        if size is None:
            return Outcome.MISS, 0
        if size != total_bytes(parts):  # packed by another codec, a group, or damaged: look closer
            return self._whole(wanted, into, deadline_s)
        return self._judged(parse_head(head), into, into, wanted, tag), size

    def _whole(self, wanted: Wanted, into: memoryview, deadline_s: float) -> tuple[Outcome, int]:
        until_s = time.monotonic() + deadline_s
        return self._unpacked(wanted, self._store.read(wanted.name, deadline_s=deadline_s), into, until_s)

    def _unpacked(self, wanted: Wanted, data: Buffer | None, into: memoryview, until_s: float) -> tuple[Outcome, int]:
        if data is None:
            return Outcome.MISS, 0
        head, payload = parse_head(_view(data)), _view(data)[HEAD_BYTES:]
        if isinstance(head, Head) and head.header.role == MANIFEST and wanted.expected.role == WHOLE:
            return self._group(wanted, head, payload, into, until_s)
        return self._judged(head, payload, into, wanted), _view(data).nbytes

    def _group(
        self, wanted: Wanted, head: Head, payload: memoryview, into: memoryview, until_s: float
    ) -> tuple[Outcome, int]:
        """Every piece, or nothing."""
        as_manifest = structs.replace(
            wanted, expected=structs.replace(wanted.expected, role=MANIFEST, plain_bytes=None)
        )
        memory = memoryview(bytearray(head.header.plain_bytes if head.header.plain_bytes <= _MAX_MANIFEST else 0))
        outcome = self._judged(head, payload, memory, as_manifest)
        if outcome is not Outcome.HIT:
            return outcome, 0
        try:
            manifest = msgspec.msgpack.decode(memory, type=Manifest)
        except msgspec.MsgspecError:
            return Outcome.CORRUPT, 0
        if manifest.plain_bytes != into.nbytes:
            return self._refuse(Verdict(Outcome.FOREIGN, "plain_bytes")), 0
        self.most_pieces = max(self.most_pieces, len(manifest.piece_bytes))
        at, moved = 0, head.payload_bytes + HEAD_BYTES
        for i, size in enumerate(manifest.piece_bytes):
            expected = structs.replace(wanted.expected, role=PIECE, piece=i, plain_bytes=size)
            piece = Wanted(piece_name(wanted.name, i), expected, wanted.owner)
            data = self._store.read(piece.name, deadline_s=_left(until_s))
            outcome, got = self._unpacked(piece, data, into[at : at + size], until_s)
            if outcome is not Outcome.HIT:
                return (Outcome.PARTIAL if outcome is Outcome.MISS else outcome), 0
            at, moved = at + size, moved + got
        return Outcome.HIT, moved

    def _judged(
        self,
        head: Head | Verdict,
        payload: memoryview,
        into: memoryview,
        wanted: Wanted,
        tag: memoryview | None = None,
    ) -> Outcome:
        if isinstance(head, Head):
            head = unpack(
                head,
                payload,
                into,
                expected=wanted.expected,
                ring=self._ring,
                owner=wanted.owner,
                now_s=self._wall_s(),
                allow_lossy=self._codec,
                tag=tag,
            )
        return self._refuse(head) if head.outcome is not Outcome.HIT else Outcome.HIT

    def _refuse(self, verdict: Verdict) -> Outcome:
        self.last_refusal = f"{verdict.outcome.value}: {verdict.detail}"
        return verdict.outcome


def _view(data: Buffer | None) -> memoryview:
    return memoryview(data or b"").cast("B")


def _left(until_s: float) -> float:
    return max(0.001, until_s - time.monotonic())


def _outcome_of(error: StoreError) -> Outcome:
    if isinstance(error, StoreTimeout):
        return Outcome.TIMEOUT
    return Outcome.NO_SPACE if isinstance(error, NoSpace) else Outcome.UNAVAILABLE
