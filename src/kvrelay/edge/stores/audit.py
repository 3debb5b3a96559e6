"""Going through a whole store: what lies there, whether it is sound, and taking away what should not.

None of it needs keys: heads are plain and the checksum is over the bytes as stored. A piece without a manifest is an
orphan (its writer died, or is still at it): it counts as one only when it is older than `ORPHAN_S`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from msgspec import Struct

from kvrelay.core.tiers.header import MANIFEST, PIECE, ObjectHeader
from kvrelay.core.tiers.manifest import piece_name
from kvrelay.core.tiers.outcome import Outcome
from kvrelay.edge.stores.contracts import PREFIX as CONTRACT
from kvrelay.edge.stores.object import HEAD_BYTES, Head, Verdict, check_payload, parse_head
from kvrelay.edge.stores.store import Store

ORPHAN_S = 600.0
NAME_BYTES = 40
_DELETED_AT_ONCE = 256


class Inspected(Struct, frozen=True):
    """One object. `outcome` is `hit` for a sound one; `header` is None where there is no readable head."""

    name: bytes
    stored_bytes: int
    outcome: Outcome
    detail: str
    header: ObjectHeader | None


class PurgeRecord(Struct, frozen=True):
    """The audit record of a deletion."""

    at_s: float
    store: str
    what: str
    objects: int
    stored_bytes: int
    left: int  # of them that are still listed afterwards


def inspect(store: Store, *, prefix: bytes = b"", deadline_s: float, payloads: bool) -> Iterator[Inspected]:
    """Every object whose name begins so. Without `payloads` only heads are judged (for a listing)."""
    for info in store.scan(prefix, deadline_s=deadline_s):
        if info.key.startswith(CONTRACT):
            continue
        yield _inspected(store, info.key, info.stored_bytes, deadline_s=deadline_s, payloads=payloads)


def purge(
    store: Store, url: str, what: str, wanted: Callable[[Inspected], bool], *, prefix: bytes = b"", deadline_s: float
) -> PurgeRecord:
    """Delete what is wanted gone, look again, and say what came of it."""
    doomed = {
        found.name: found.stored_bytes
        for found in inspect(store, prefix=prefix, deadline_s=deadline_s, payloads=False)
        if wanted(found)
    }
    names = list(doomed)
    gone = sum(
        store.delete(names[at : at + _DELETED_AT_ONCE], deadline_s=deadline_s)
        for at in range(0, len(names), _DELETED_AT_ONCE)
    )
    left = sum(1 for info in store.scan(prefix, deadline_s=deadline_s) if info.key in doomed)
    return PurgeRecord(time.time(), url, what, gone, sum(doomed.values()), left)


def scrub(store: Store, *, deadline_s: float) -> Iterator[Inspected]:
    """Delete what can never be a hit: damaged and expired objects, pieces without a manifest, manifests without a
    piece. Yields what it deleted."""
    found = list(inspect(store, deadline_s=deadline_s, payloads=True))
    names = {one.name for one in found}
    now_s = time.time()
    for one in found:
        verdict = _useless(one, names, now_s)
        if verdict is not None:
            store.delete([one.name], deadline_s=deadline_s)
            yield Inspected(one.name, one.stored_bytes, verdict.outcome, verdict.detail, one.header)


def _useless(one: Inspected, names: set[bytes], now_s: float) -> Verdict | None:
    if one.outcome in (Outcome.CORRUPT, Outcome.PARTIAL, Outcome.FOREIGN, Outcome.EXPIRED):
        return Verdict(one.outcome, one.detail)
    header = one.header
    if header is None:
        return None
    if header.role == PIECE and one.name[:NAME_BYTES] not in names and now_s - header.created_s > ORPHAN_S:
        return Verdict(Outcome.PARTIAL, "a piece without its manifest")
    if header.role == MANIFEST and any(piece_name(one.name, i) not in names for i in range(header.piece)):
        return Verdict(Outcome.PARTIAL, "a manifest without all of its pieces")
    return None


def _inspected(store: Store, name: bytes, stored_bytes: int, *, deadline_s: float, payloads: bool) -> Inspected:
    head_memory = memoryview(bytearray(HEAD_BYTES))
    if payloads:
        data = memoryview(store.read(name, deadline_s=deadline_s) or b"").cast("B")
        head_memory, payload = data[:HEAD_BYTES], data[HEAD_BYTES:]
    elif store.read_into(name, (head_memory, memoryview(bytearray(stored_bytes))), deadline_s=deadline_s) is None:
        return Inspected(name, stored_bytes, Outcome.MISS, "gone meanwhile", None)
    head = parse_head(head_memory)
    if not isinstance(head, Head):
        return Inspected(name, stored_bytes, head.outcome, head.detail, None)
    verdict = check_payload(head, payload) if payloads else Verdict(Outcome.HIT)
    if verdict.outcome is Outcome.HIT:
        verdict = _in_its_place(name, head.header)
    return Inspected(name, stored_bytes, verdict.outcome, verdict.detail, head.header)


def _in_its_place(name: bytes, header: ObjectHeader) -> Verdict:
    """Does the object lie under the name that its head says?"""
    own = header.tenant_tag + header.key
    if name != (piece_name(own, header.piece) if header.role == PIECE else own):
        return Verdict(Outcome.FOREIGN, "lies under another object's name")
    if header.expires_s is not None and header.expires_s <= time.time():
        return Verdict(Outcome.EXPIRED)
    return Verdict(Outcome.HIT)
