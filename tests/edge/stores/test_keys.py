"""Encryption: nothing readable at rest, nothing readable for others, keys that change and go."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from msgspec import structs
from pyaegis import Aegis256X2

from kvrelay.core.tiers.outcome import Outcome
from kvrelay.edge.stores.ciphers import (
    AEGIS_256X2,
    AES_256_GCM,
    CIPHERS,
    KEY_BYTES,
    TAG_BYTES,
    Cipher,
    WrongTag,
)
from kvrelay.edge.stores.extras import MissingExtra
from kvrelay.edge.stores.keys import KeyRing, KeyRingError, load_key_ring, parse_key_ring
from kvrelay.edge.stores.memory import MemoryStore
from kvrelay.edge.stores.tiered import TieredStore
from tests.edge.stores.test_tiered import KEYS, NAMESPACE, SHAPE

OLD, NEW = "old " + "11" * 32, "new " + "22" * 32
CANARY = (b"the canary in plain text " * 400)[: SHAPE.payload_bytes]


def open_with(store: MemoryStore, ring: KeyRing) -> TieredStore:
    return TieredStore.open({"tiers": [{"url": "memory://"}], "deadline_ms": 2000}, stores=[store], ring=ring)


def load(store: TieredStore, namespace=NAMESPACE) -> tuple[Outcome, bytes]:  # type: ignore[no-untyped-def]
    into = bytearray(SHAPE.payload_bytes)
    fetched = store.fetch(store.plan(namespace, KEYS[:1], SHAPE), [memoryview(into)])
    return fetched.outcomes[0], bytes(into)


def sealed_by(cipher: Cipher, plain: bytes) -> bytearray:
    sealed = bytearray(len(plain) + TAG_BYTES)
    cipher.encrypt_into(b"n" * cipher.nonce_bytes, plain, b"head", sealed)
    return sealed


@pytest.mark.parametrize("size", [0, 1, 15, 262_145])
@pytest.mark.parametrize("name", CIPHERS)
def test_a_cipher_opens_what_it_sealed_and_nothing_else(name: str, size: int) -> None:
    cipher, plain = CIPHERS[name](b"k" * KEY_BYTES), bytes(i % 251 for i in range(size))
    sealed = sealed_by(cipher, plain)

    def opened(*, in_place: bool, changed: int | None = None, head: bytes = b"head") -> bytes:
        message = bytearray(sealed)
        if changed is not None:
            message[changed] ^= 1
        source, tag = message[:-TAG_BYTES], message[-TAG_BYTES:]
        into = source if in_place else bytearray(size)
        cipher.decrypt_into(b"n" * cipher.nonce_bytes, source, tag, head, into)
        return bytes(into)

    for in_place in (False, True):
        assert opened(in_place=in_place) == plain
        for at in {0, size // 2, size, size + TAG_BYTES - 1}:
            with pytest.raises(WrongTag):
                opened(in_place=in_place, changed=at)
        with pytest.raises(WrongTag):
            opened(in_place=in_place, head=b"another")


def test_the_ciphers_are_those_of_their_libraries() -> None:
    """As anybody else would call them; AEGIS-256X2 also with the first test vector of RFC 10032, appendix A."""
    plain = bytes(range(256)) * 20
    by_aes = AESGCM(b"k" * KEY_BYTES).encrypt(b"n" * 12, plain, b"head")
    assert sealed_by(CIPHERS[AES_256_GCM](b"k" * KEY_BYTES), plain) == by_aes
    by_aegis = Aegis256X2(TAG_BYTES).encrypt(b"k" * KEY_BYTES, b"n" * 16 + bytes(16), plain, b"head")
    assert sealed_by(CIPHERS[AEGIS_256X2](b"k" * KEY_BYTES), plain) == by_aegis
    key, nonce = bytes(range(32)), bytes(range(0x10, 0x30))
    assert Aegis256X2(TAG_BYTES).encrypt(key, nonce, b"", b"").hex() == "62cdbab084c83dacdb945bb446f049c8"


def test_whatever_cipher_is_set_objects_of_either_are_read() -> None:
    for written_by, read_by in ((AES_256_GCM, AEGIS_256X2), (AEGIS_256X2, AES_256_GCM)):
        medium = MemoryStore()
        writer = open_with(medium, parse_key_ring(OLD, source="test", cipher=written_by))
        assert writer.store(NAMESPACE, KEYS[0], SHAPE, [CANARY]).stored
        (kept,) = [bytes(medium.read(info.key, deadline_s=1) or b"") for info in medium.scan(deadline_s=1)]
        assert b"canary" not in kept and written_by.encode() in kept
        reader = open_with(medium, parse_key_ring(OLD, source="test", cipher=read_by))
        assert load(reader) == (Outcome.HIT, CANARY)
        writer.close(), reader.close()


def test_a_cipher_that_is_not_installed_is_missed_at_the_start_and_its_objects_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    medium = MemoryStore()
    writer = open_with(medium, parse_key_ring(OLD, source="test", cipher=AEGIS_256X2))
    assert writer.store(NAMESPACE, KEYS[0], SHAPE, [CANARY]).stored
    monkeypatch.setitem(sys.modules, "pyaegis", None)
    with pytest.raises(MissingExtra, match=r"kvrelay\[aegis\]"):
        parse_key_ring(OLD, source="test", cipher=AEGIS_256X2)
    reader = open_with(medium, parse_key_ring(OLD, source="test"))
    assert load(reader)[0] is Outcome.REFUSED
    writer._host._alarm.stop(), reader._host._alarm.stop()


@pytest.mark.covers("SG-09")
def test_at_rest_there_is_no_plain_text_and_a_wrong_key_opens_nothing() -> None:
    medium = MemoryStore()
    writer = open_with(medium, parse_key_ring(OLD, source="test"))
    assert writer.store(NAMESPACE, KEYS[0], SHAPE, [CANARY]).stored
    (kept,) = [bytes(medium.read(info.key, deadline_s=1) or b"") for info in medium.scan(deadline_s=1)]
    assert b"canary" not in kept and b"tenant-a" not in kept
    assert load(writer) == (Outcome.HIT, CANARY)
    same_id = open_with(medium, parse_key_ring("old " + "33" * 32, source="test"))
    outcome, found = load(same_id)
    assert outcome is Outcome.CORRUPT and b"canary" not in found
    writer._host._alarm.stop(), same_id._host._alarm.stop()


def test_rotation_reads_the_old_writes_the_new_and_a_dropped_key_is_the_end() -> None:
    medium = MemoryStore()
    before = open_with(medium, parse_key_ring(OLD, source="test"))
    before.store(NAMESPACE, KEYS[0], SHAPE, [CANARY])
    rotated = open_with(medium, parse_key_ring(f"{NEW}\n{OLD}\n", source="test"))
    assert load(rotated) == (Outcome.HIT, CANARY)
    dropped = open_with(medium, parse_key_ring(NEW, source="test"))
    assert load(dropped)[0] is Outcome.REFUSED
    for store in (before, rotated, dropped):
        store._host._alarm.stop()


@pytest.mark.covers("SG-09")
def test_a_tenant_without_the_secret_cannot_read_even_with_the_ring() -> None:
    medium = MemoryStore()
    store = open_with(medium, parse_key_ring(OLD, source="test"))
    store.store(NAMESPACE, KEYS[0], SHAPE, [CANARY])
    thief = structs.replace(NAMESPACE, tenant_key=b"another secret")
    assert load(store, thief)[0] is Outcome.MISS, "not even the name can be formed"
    store.close()


def test_rings_from_a_file_the_environment_and_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = tmp_path / "ring"
    ring.write_text(f"# first line encrypts\n{NEW}\n{OLD}\n")
    ring.chmod(0o600)
    monkeypatch.setenv("RING", f"{NEW};{OLD}")
    command = f"command:{sys.executable} -c 'print(open(\"{ring}\").read())'"
    for source in (f"file:{ring}", "env:RING", command):
        loaded = load_key_ring(source)
        assert loaded.active_id == "new" and loaded.knows("old") and "22" not in repr(loaded)
    assert not load_key_ring("none").encrypts


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("vault:x", "is no place for keys"),
        ("env:NOT_SET_HERE", "is not set"),
        ("file:/nowhere", "cannot read"),
        ("command:false", "ended with status 1"),
        ("command:/nowhere", "did not run"),
    ],
)
def test_what_cannot_be_used_is_said_without_showing_keys(source: str, said: str) -> None:
    with pytest.raises(KeyRingError, match=said):
        load_key_ring(source)


def test_bad_rings(tmp_path: Path) -> None:
    for text, said in (
        ("", "has no key"),
        ("k1 abc", "64 hex digits"),
        (f"{OLD}\n{OLD}", "repeats"),
        ("k zz" + "1" * 62, "hex"),
    ):
        with pytest.raises(KeyRingError, match=said):
            parse_key_ring(text, source="test")
    readable = tmp_path / "ring"
    readable.write_text(OLD)
    readable.chmod(0o644)
    with pytest.raises(KeyRingError, match="chmod 600"):
        load_key_ring(f"file:{readable}")
