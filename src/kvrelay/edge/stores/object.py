"""A stored object: a head of fixed size, then the payload.

    0   magic "KVRO"        4   48  checksum of the head (xxh3-64 over the other 504 bytes)  8
    4   format version      2   56  header, MessagePack array (`core/tiers/header.py`)
    6   header length       2   ..  zeros
    8   payload length      8   512 payload: codec, then cipher (the tag of 16 bytes at its end)
    16  payload checksum   16
    32  nonce, then zeros  16

The head has one size so that a reader can give a store two buffers, head and destination, and the payload needs no
copy. The payload's checksum (xxh3-128) is over the bytes as stored: a scrubber needs no keys. The associated data of
the cipher is the header with version and lengths, so that a ciphertext under another name, tenant, epoch or range does
not decrypt.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence

import msgspec
import xxhash
from msgspec import Struct

from kvrelay.core.tiers.header import CIPHER_NONE, FORMAT_VERSION, Expected, ObjectHeader, judge
from kvrelay.core.tiers.outcome import Outcome
from kvrelay.edge.stores.ciphers import CIPHERS, TAG_BYTES, WrongTag
from kvrelay.edge.stores.codecs import RAW, CodecError, codec
from kvrelay.edge.stores.extras import MissingExtra
from kvrelay.edge.stores.keys import KeyRing
from kvrelay.edge.stores.store import Buffer, total_bytes

MAGIC = b"KVRO"
HEAD_BYTES = 512
_FIXED = struct.Struct("<4sHHQ16s16s")
_CHECKSUM_AT, _HEADER_AT = 48, 56
_encode_header = msgspec.msgpack.Encoder().encode
_decode_header = msgspec.msgpack.Decoder(ObjectHeader).decode


class Head(Struct, frozen=True):
    """The head of a stored object, parsed and free of damage."""

    header: ObjectHeader
    payload_bytes: int  # as stored
    payload_xxh3_128: bytes
    nonce: bytes
    encoded_header: bytes

    @property
    def associated_data(self) -> bytes:
        return _associated(self.encoded_header, self.payload_bytes)


class Verdict(Struct, frozen=True):
    """`hit`, or what is wrong and where."""

    outcome: Outcome
    detail: str = ""


HIT = Verdict(Outcome.HIT)


class Owner(Struct, frozen=True):
    """Whose objects are sealed and opened. `secret` stays in this process."""

    tag: bytes
    secret: bytes
    epoch: int

    def __repr__(self) -> str:
        return f"Owner(tag={self.tag.hex()}, epoch={self.epoch})"


def seal(header: ObjectHeader, parts: Sequence[Buffer], *, ring: KeyRing, owner: Owner) -> list[Buffer]:
    """The object as parts to write. The header's codec says how `parts` are packed, its cipher and key id are set here.

    Without codec and cipher the parts are used where they lie; they must not change until the write is over."""
    packed: list[Buffer] = list(parts)
    if header.codec != RAW:
        packed = [codec(header.codec).encode(memoryview(_joined(parts)), header.dtype)]
    nonce = b""
    if ring.encrypts:
        name = ring.active_cipher
        header = msgspec.structs.replace(header, cipher=name, key_id=ring.active_id)
        encoded = _encode_header(header)
        sealed = bytearray(total_bytes(packed) + TAG_BYTES)
        cipher = ring.cipher(name, ring.active_id, tenant_key=owner.secret, tenant_tag=owner.tag, epoch=owner.epoch)
        nonce = os.urandom(cipher.nonce_bytes)
        cipher.encrypt_into(nonce, _joined(packed), _associated(encoded, len(sealed)), sealed)
        packed = [sealed]
    else:
        header = msgspec.structs.replace(header, cipher=CIPHER_NONE, key_id="")
        encoded = _encode_header(header)
    return [_build_head(encoded, packed, nonce), *packed]


def parse_head(data: memoryview) -> Head | Verdict:
    """The head, or why there is none."""
    if data.nbytes < HEAD_BYTES:
        return Verdict(Outcome.PARTIAL, f"{data.nbytes} bytes, a head has {HEAD_BYTES}")
    data = data[:HEAD_BYTES]
    magic, version, header_bytes, payload_bytes, checksum, nonce = _FIXED.unpack_from(data)
    if magic != MAGIC:
        return Verdict(Outcome.CORRUPT, "magic")
    if _head_checksum(data) != data[_CHECKSUM_AT:_HEADER_AT]:
        return Verdict(Outcome.CORRUPT, "head")
    if version != FORMAT_VERSION:  # a newer one may be of use to somebody, an older one makes room for ours
        outcome = Outcome.REFUSED if version > FORMAT_VERSION else Outcome.EXPIRED
        return Verdict(outcome, f"format version {version}, this release reads {FORMAT_VERSION}")
    encoded = bytes(data[_HEADER_AT : _HEADER_AT + header_bytes])
    try:
        header = _decode_header(encoded)
    except msgspec.MsgspecError:
        return Verdict(Outcome.CORRUPT, "header")
    return Head(header, payload_bytes, checksum, nonce, encoded)


def check_payload(head: Head, payload: memoryview) -> Verdict:
    """Whether these are the bytes that were stored. Needs no key."""
    if payload.nbytes != head.payload_bytes:
        return Verdict(Outcome.PARTIAL, f"{payload.nbytes} of {head.payload_bytes} payload bytes")
    return _whole(head, payload)


def _whole(head: Head, *parts: memoryview) -> Verdict:
    return HIT if _checksum(parts) == head.payload_xxh3_128 else Verdict(Outcome.CORRUPT, "payload")


def _checksum(parts: Sequence[Buffer]) -> bytes:
    checksum = xxhash.xxh3_128()
    for part in parts:
        checksum.update(part)
    return bytes(checksum.digest())


def readable(head: Head, *, ring: KeyRing, allow_lossy: str | None) -> Verdict:
    """Whether this process may and can unpack the payload."""
    header = head.header
    if header.cipher == CIPHER_NONE:
        if ring.encrypts:  # or anybody who can write to the medium could plant plain objects
            return Verdict(Outcome.REFUSED, "not encrypted, and encryption is on")
    elif header.cipher not in CIPHERS:
        return Verdict(Outcome.REFUSED, f"cipher {header.cipher}")
    elif not ring.knows(header.key_id):
        return Verdict(Outcome.REFUSED, f"key id {header.key_id}")
    try:
        lossy = codec(header.codec).lossy
    except ValueError as error:
        return Verdict(Outcome.REFUSED, str(error))
    if lossy and header.codec != allow_lossy:
        return Verdict(Outcome.REFUSED, f"codec {header.codec} loses precision and is not configured here")
    return HIT


def unpack(
    head: Head,
    payload: memoryview,
    into: memoryview,
    *,
    expected: Expected,
    ring: KeyRing,
    owner: Owner,
    now_s: float,
    allow_lossy: str | None = None,
    tag: memoryview | None = None,
) -> Verdict:
    """Judge, decrypt, verify and unpack into `into`, whose content is undefined unless the answer is `hit`.

    `payload` may be the same object as `into`; with encryption it then lacks its end, which is `tag`."""
    outcome, member = judge(head.header, expected, now_s=now_s)
    if outcome is not Outcome.HIT:
        return Verdict(outcome, member)
    verdict = readable(head, ring=ring, allow_lossy=allow_lossy)
    if verdict is not HIT:
        return verdict
    header = head.header
    if header.plain_bytes != into.nbytes:
        return Verdict(Outcome.FOREIGN, f"plain_bytes {header.plain_bytes}, the destination has {into.nbytes}")
    stored_bytes = payload.nbytes if tag is None else payload.nbytes + tag.nbytes
    if stored_bytes != head.payload_bytes:
        return Verdict(Outcome.PARTIAL, f"{stored_bytes} of {head.payload_bytes} payload bytes")
    if header.cipher == CIPHER_NONE:
        verdict = check_payload(head, payload)
        if verdict is not HIT or payload is into:
            return verdict
    else:
        if tag is None:
            payload, tag = payload[:-TAG_BYTES], payload[-TAG_BYTES:]
        plain = into if header.codec == RAW else memoryview(bytearray(payload.nbytes))
        verdict = _decrypt(head, payload, tag, plain, ring=ring, owner=owner)
        if verdict is not HIT or header.codec == RAW:
            return verdict
        payload = plain
    try:
        codec(header.codec).decode(payload, header.dtype, into)
    except CodecError as error:
        return Verdict(Outcome.CORRUPT, f"codec {header.codec}: {error}")
    return HIT


def _decrypt(
    head: Head, sealed: memoryview, tag: memoryview, into: memoryview, *, ring: KeyRing, owner: Owner
) -> Verdict:
    """The cipher's tag covers every byte, so the checksum need not be computed as well unless it is the quicker no."""
    if tag.nbytes != TAG_BYTES or into.nbytes != sealed.nbytes:
        return Verdict(Outcome.PARTIAL, f"{sealed.nbytes} encrypted bytes")
    name, key_id = head.header.cipher, head.header.key_id
    try:
        cipher = ring.cipher(name, key_id, tenant_key=owner.secret, tenant_tag=owner.tag, epoch=owner.epoch)
    except MissingExtra as problem:
        return Verdict(Outcome.REFUSED, str(problem))
    if cipher.refuses_slowly:
        verdict = _whole(head, sealed, tag)
        if verdict is not HIT:
            return verdict
    try:
        cipher.decrypt_into(head.nonce[: cipher.nonce_bytes], sealed, tag, head.associated_data, into)
    except WrongTag:
        return Verdict(Outcome.CORRUPT, "cipher tag")
    return HIT


def _build_head(encoded: bytes, packed: Sequence[Buffer], nonce: bytes) -> bytearray:
    if len(encoded) > HEAD_BYTES - _HEADER_AT:
        raise ValueError(f"the header takes {len(encoded)} bytes, there is room for {HEAD_BYTES - _HEADER_AT}")
    head = bytearray(HEAD_BYTES)
    _FIXED.pack_into(head, 0, MAGIC, FORMAT_VERSION, len(encoded), total_bytes(packed), _checksum(packed), nonce)
    head[_HEADER_AT : _HEADER_AT + len(encoded)] = encoded
    head[_CHECKSUM_AT:_HEADER_AT] = _head_checksum(memoryview(head))
    return head


def _head_checksum(head: memoryview) -> bytes:
    checksum = xxhash.xxh3_64(head[:_CHECKSUM_AT])
    checksum.update(head[_HEADER_AT:])
    return bytes(checksum.digest())


def _associated(encoded_header: bytes, payload_bytes: int) -> bytes:
    return struct.pack("<4sHQ", MAGIC, FORMAT_VERSION, payload_bytes) + encoded_header


def _joined(parts: Sequence[Buffer]) -> Buffer:
    return parts[0] if len(parts) == 1 else b"".join(parts)
