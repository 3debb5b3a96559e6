"""The fault matrix: one stored chunk, one thing wrong with it, one load. What must hold in every case:

* a chunk is ready only with exactly the bytes that were stored;
* the outcome is one that the fault allows, and it is counted;
* the load has failed if the policy is `fail`, and has not if it is `recompute`;
* storing what was computed anew and loading it again works.

Cases are generated from a seed: which fault, where, with or without encryption, codec and pieces.
"""

from __future__ import annotations

import itertools
import random
import struct
from collections import Counter
from collections.abc import Callable

import xxhash
from msgspec import Struct

from kvrelay.core.contract.identity import Namespace
from kvrelay.core.tiers.header import FORMAT_VERSION
from kvrelay.core.tiers.manifest import piece_name
from kvrelay.core.tiers.outcome import Outcome
from kvrelay.edge.stores.ciphers import CIPHERS
from kvrelay.edge.stores.keys import KeyRing, parse_key_ring
from kvrelay.edge.stores.object import HEAD_BYTES
from kvrelay.edge.stores.store import Store
from kvrelay.edge.stores.tiered import ChunkShape, TieredStore, owner_of

S = 5.0
PAYLOAD_BYTES = 2048
SHAPE = ChunkShape(tokens=32, payload_bytes=PAYLOAD_BYTES, layers=2, dtype="bfloat16", shape=(2, 32, 1, 16))
MINE = Namespace(b"c" * 32, "mine", b"secret of mine", 3)
RINGS = {
    "none": KeyRing({}),
    **{name: parse_key_ring(f"new {'ab' * 32}; old {'cd' * 32}", source="the test", cipher=name) for name in CIPHERS},
}
OLD_RING = parse_key_ring(f"old {'cd' * 32}", source="the test")
LOST_RING = parse_key_ring(f"lost {'ef' * 32}", source="the test")

OTHERS = {
    "contract": Namespace(b"d" * 32, "mine", b"secret of mine", 3),
    "epoch": Namespace(b"c" * 32, "mine", b"secret of mine", 4),
    "tenant": Namespace(b"c" * 32, "theirs", b"secret of theirs", 3),
    "key": MINE,
}
BAD_BYTES = frozenset(
    {Outcome.CORRUPT, Outcome.PARTIAL, Outcome.FOREIGN, Outcome.REFUSED, Outcome.EXPIRED, Outcome.MISS}
)


class Setup(Struct, frozen=True):
    """How the objects of a run are kept."""

    cipher: str
    codec: str
    pieces: bool
    policy: str = "recompute"

    def open(self, store: Store, ring: KeyRing | None = None) -> TieredStore:
        config = {
            "tiers": [{"url": "memory://", "codec": self.codec, "promote": "never"}],
            "deadline_ms": 5000,
            "piece_bytes": 700 if self.pieces else 1 << 20,
            "break_even": False,
            "failure_policy": self.policy,
        }
        return TieredStore.open(config, stores=[store], ring=RINGS[self.cipher] if ring is None else ring)


_WAYS = itertools.product(RINGS, ("raw", "zstd", "lz4"), (False, True))
SETUPS = [
    Setup(cipher, codec, pieces, ("recompute", "fail")[(n // 2 + n) % 2])
    for n, (cipher, codec, pieces) in enumerate(_WAYS)
]


class Case:
    """One chunk in one store, about to be spoilt."""

    def __init__(self, store: Store, tiered: TieredStore, setup: Setup, number: int, chance: random.Random) -> None:
        self.store, self.tiered, self.setup, self.chance = store, tiered, setup, chance
        self.key = number.to_bytes(32, "big")
        self.name = owner_of(MINE).tag + self.key
        self.payload = chance.randbytes(PAYLOAD_BYTES)

    def keep(self) -> None:
        assert self.tiered.store(MINE, self.key, SHAPE, [self.payload]).stored

    def load(self) -> Outcome:
        """The outcome of loading; the bytes are right if it is a hit."""
        into = bytearray(b"\xee" * PAYLOAD_BYTES)
        fetched = self.tiered.fetch(self.tiered.plan(MINE, [self.key], SHAPE), [memoryview(into)])
        if fetched.outcomes[0] is Outcome.HIT:
            assert bytes(into) == self.payload, "a wrong byte is Ready"
        assert fetched.failed == (self.setup.policy == "fail" and not fetched.ready), "the policy was not followed"
        return fetched.outcomes[0]

    def part(self) -> bytes:
        """The name of some object of this chunk that holds payload."""
        pieces = -(-PAYLOAD_BYTES // 700)
        return piece_name(self.name, self.chance.randrange(pieces)) if self.setup.pieces else self.name

    def stored(self, name: bytes) -> bytes:
        found = self.store.read(name, deadline_s=S)
        assert found is not None
        return bytes(found)

    def put(self, name: bytes, content: bytes) -> None:
        if content:
            self.store.write(name, [content], only_if_absent=False, deadline_s=S)
        else:
            self.store.delete([name], deadline_s=S)

    def flip(self, start: int, end: int | None) -> None:
        name = self.chance.choice([self.name, self.part()])
        content = bytearray(self.stored(name))
        at = self.chance.randrange(start, len(content) if end is None else min(end, len(content)))
        content[at] ^= 1 << self.chance.randrange(8)
        self.put(name, bytes(content))


def absent(case: Case) -> None:
    case.store.delete([case.name], deadline_s=S)


def truncated(case: Case) -> None:
    name = case.part()
    content = case.stored(name)
    case.put(name, content[: case.chance.randrange(len(content))])


def lengthened(case: Case) -> None:
    name = case.part()
    case.put(name, case.stored(name) + case.chance.randbytes(1 + case.chance.randrange(64)))


def flipped_in_preamble(case: Case) -> None:
    case.flip(0, 48)


def flipped_in_checksum(case: Case) -> None:
    case.flip(48, 56)


def flipped_in_header(case: Case) -> None:
    case.flip(56, 300)


def flipped_in_padding(case: Case) -> None:
    case.flip(300, HEAD_BYTES)


def flipped_in_payload(case: Case) -> None:
    case.flip(HEAD_BYTES, None)


def foreign(case: Case) -> None:
    """Somebody else's sound object under this name."""
    other = case.chance.choice(list(OTHERS.values()))
    number = int.from_bytes(case.key, "big") + (1 << 200)
    assert case.tiered.store(other, number.to_bytes(32, "big"), SHAPE, [case.chance.randbytes(PAYLOAD_BYTES)]).stored
    theirs = owner_of(other).tag + number.to_bytes(32, "big")
    case.put(case.name, case.stored(theirs))


def foreign_payload(case: Case) -> None:
    """Our head, another object's payload: two ciphertexts exchanged."""
    number = int.from_bytes(case.key, "big") + (1 << 201)
    assert case.tiered.store(MINE, number.to_bytes(32, "big"), SHAPE, [case.chance.randbytes(PAYLOAD_BYTES)]).stored
    theirs = owner_of(MINE).tag + number.to_bytes(32, "big")
    mine, other = case.part(), theirs
    if case.setup.pieces:
        other = piece_name(theirs, 0)
        mine = piece_name(case.name, 0)
    case.put(mine, case.stored(mine)[:HEAD_BYTES] + case.stored(other)[HEAD_BYTES:])


def partial_group(case: Case) -> None:
    """A piece is missing; of a chunk in one object, all of it."""
    case.store.delete([case.part()], deadline_s=S)


def exchanged_pieces(case: Case) -> None:
    """Two pieces of one chunk under each other's names; of a chunk in one object, its payload upside down."""
    if case.setup.pieces:
        first, second = piece_name(case.name, 0), piece_name(case.name, 1)
        one, two = case.stored(first), case.stored(second)
        case.put(first, two)
        case.put(second, one)
    else:
        content = case.stored(case.name)
        case.put(case.name, content[:HEAD_BYTES] + content[HEAD_BYTES:][::-1])


def lost_key_id(case: Case) -> None:
    """Encrypted under a key that this process does not have (or, without encryption, encrypted at all)."""
    case.put(case.name, b"")
    for i in range(-(-PAYLOAD_BYTES // 700)):
        case.put(piece_name(case.name, i), b"")
    other = case.setup.open(case.store, LOST_RING)
    assert other.store(MINE, case.key, SHAPE, [case.payload]).stored
    other._host._alarm.stop()


def _of_format(case: Case, version: int) -> None:
    """As another release would have written it."""
    content = bytearray(case.stored(case.name))
    struct.pack_into("<H", content, 4, version)
    content[48:56] = xxhash.xxh3_64_digest(bytes(content[:48]) + bytes(content[56:HEAD_BYTES]))
    case.put(case.name, bytes(content))


def older_format(case: Case) -> None:
    _of_format(case, FORMAT_VERSION - 1)


def newer_format(case: Case) -> None:
    _of_format(case, FORMAT_VERSION + 1 + case.chance.randrange(9))


def evicted_between_check_and_read(case: Case) -> None:
    plan = case.tiered.lookup(MINE, [case.key], SHAPE)
    assert plan.keys == (case.key,)
    case.store.delete([case.name], deadline_s=S)


def zeros(case: Case) -> None:
    """What a file system may leave after a power failure: the length is right."""
    name = case.part()
    case.put(name, bytes(len(case.stored(name))))


FAULTS: dict[Callable[[Case], None], frozenset[Outcome]] = {
    absent: frozenset({Outcome.MISS}),
    truncated: frozenset({Outcome.PARTIAL, Outcome.MISS, Outcome.CORRUPT}),
    lengthened: frozenset({Outcome.PARTIAL, Outcome.CORRUPT}),
    flipped_in_preamble: frozenset({Outcome.CORRUPT}),
    flipped_in_checksum: frozenset({Outcome.CORRUPT}),
    flipped_in_header: frozenset({Outcome.CORRUPT}),
    flipped_in_padding: frozenset({Outcome.CORRUPT}),
    flipped_in_payload: frozenset({Outcome.CORRUPT}),
    foreign: frozenset({Outcome.FOREIGN}),
    foreign_payload: frozenset({Outcome.CORRUPT, Outcome.PARTIAL}),
    partial_group: frozenset({Outcome.PARTIAL, Outcome.MISS}),
    exchanged_pieces: frozenset({Outcome.FOREIGN, Outcome.CORRUPT}),
    lost_key_id: frozenset({Outcome.REFUSED}),
    older_format: frozenset({Outcome.EXPIRED}),
    newer_format: frozenset({Outcome.REFUSED}),
    evicted_between_check_and_read: frozenset({Outcome.MISS}),
    zeros: frozenset({Outcome.CORRUPT}),
}


EVERY_FAULT_IN_EVERY_SETUP = len(FAULTS) * len(SETUPS)


def run_cases(store: Store, *, cases: int, seed: int) -> dict[str, Counter[str]]:
    """Generate and judge so many cases; returns the outcomes by fault."""
    chance = random.Random(seed)
    done: dict[str, Counter[str]] = {}
    opened = {setup: setup.open(store) for setup in SETUPS}
    faults = list(FAULTS)
    try:
        for n in range(cases):
            setup = SETUPS[n % len(SETUPS)]
            fault = faults[(n // len(SETUPS)) % len(faults)]
            one = Case(store, opened[setup], setup, n, chance)
            done.setdefault(fault.__name__, Counter())[judge(one, fault).value] += 1
    finally:
        for tiered in opened.values():
            tiered._host._alarm.stop()
    return done


def judge(case: Case, fault: Callable[[Case], None]) -> Outcome:
    case.keep()
    assert case.load() is Outcome.HIT
    before = counted(case.tiered)
    fault(case)
    outcome = case.load()
    where = f"{fault.__name__} with {case.setup}: {outcome}"
    assert outcome in FAULTS[fault], where
    after = counted(case.tiered)
    assert after["fetch", outcome.value] == before["fetch", outcome.value] + 1, f"{where} is not counted"
    recomputed(case, where)
    return outcome


def recomputed(case: Case, where: str) -> None:
    """The engine computed the chunk anew and keeps it: from now on it is there again."""
    if case.load() is Outcome.REFUSED:  # not ours to delete: another process may hold the key, or be a newer release
        return
    assert case.tiered.store(MINE, case.key, SHAPE, [case.payload]).stored, where
    assert case.load() is Outcome.HIT, f"{where}: not there after being stored again"


def counted(tiered: TieredStore) -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    for entry in tiered.report()["ops"]:
        counts[entry["op"], entry["outcome"]] += entry["count"]
    return counts
