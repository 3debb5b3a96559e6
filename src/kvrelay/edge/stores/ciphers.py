"""Authenticated encryption from buffer to buffer: which ciphers there are, and how each is used.

`aes-256-gcm` (NIST SP 800-38D) is everywhere and the default. `aegis-256x2` (RFC 10032) is two to three times as fast
where the processor has wide AES instructions that the library of the other one does not use. An object's header names
its cipher, so a ring reads both and writes one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvrelay.edge.stores.codecs import copy
from kvrelay.edge.stores.extras import need
from kvrelay.edge.stores.store import Buffer

KEY_BYTES = 32
TAG_BYTES = 16
AES_256_GCM, AEGIS_256X2 = "aes-256-gcm", "aegis-256x2"


class WrongTag(Exception):
    """These are not the bytes that were encrypted, or not by this key, or not for this head."""


class Cipher(Protocol):
    nonce_bytes: int  # random ones, up to 16
    refuses_slowly: bool  # to refuse a megabyte takes tens of milliseconds: look first whether it is damaged

    def encrypt_into(self, nonce: bytes, plain: Buffer, associated: bytes, into: Buffer) -> None:
        """`into` has TAG_BYTES more than `plain`; the tag is at its end."""
        ...

    def decrypt_into(self, nonce: bytes, sealed: Buffer, tag: Buffer, associated: bytes, into: Buffer) -> None:
        """`sealed`, without its tag, and `into` may be one buffer. Raises WrongTag; only without it the content of
        `into` means anything."""
        ...


class Aes256Gcm:
    nonce_bytes = 12
    refuses_slowly = False

    def __init__(self, key: bytes) -> None:
        ciphers = need("cryptography.hazmat.primitives.ciphers", extra="store", purpose="encryption")
        aead = need("cryptography.hazmat.primitives.ciphers.aead", extra="store", purpose="encryption")
        self._wrong_tag = need("cryptography.exceptions", extra="store", purpose="encryption").InvalidTag
        self._whole = aead.AESGCM(key)
        self._mode, self._new, self._algorithm = ciphers.modes.GCM, ciphers.Cipher, ciphers.algorithms.AES256(key)

    def encrypt_into(self, nonce: bytes, plain: Buffer, associated: bytes, into: Buffer) -> None:
        self._whole.encrypt_into(nonce, plain, associated, into)

    def decrypt_into(self, nonce: bytes, sealed: Buffer, tag: Buffer, associated: bytes, into: Buffer) -> None:
        context = self._new(self._algorithm, self._mode(nonce)).decryptor()
        context.authenticate_additional_data(associated)
        context.update_into(sealed, into)
        try:
            context.finalize_with_tag(bytes(tag))
        except self._wrong_tag:
            raise WrongTag from None


class Aegis256x2:
    nonce_bytes = 16  # of the 32 that it has; zeros after them
    refuses_slowly = True  # its library wipes byte by byte what it refuses

    def __init__(self, key: bytes) -> None:
        aegis = need("pyaegis", extra="aegis", purpose=f"cipher `{AEGIS_256X2}`")
        self._key, self._cipher, self._wrong_tag = key, aegis.Aegis256X2(TAG_BYTES), aegis.DecryptionError

    def encrypt_into(self, nonce: bytes, plain: Buffer, associated: bytes, into: Buffer) -> None:
        into = memoryview(into)
        copy(plain, into[:-TAG_BYTES])
        into[-TAG_BYTES:] = self._cipher.encrypt_inplace(self._key, _padded(nonce), into[:-TAG_BYTES], associated)

    def decrypt_into(self, nonce: bytes, sealed: Buffer, tag: Buffer, associated: bytes, into: Buffer) -> None:
        if sealed is not into:
            copy(sealed, memoryview(into))
        try:
            self._cipher.decrypt_inplace(self._key, _padded(nonce), memoryview(into), bytes(tag), associated)
        except self._wrong_tag:
            raise WrongTag from None


def _padded(nonce: bytes) -> bytes:
    return nonce.ljust(32, b"\0")


CIPHERS: dict[str, Callable[[bytes], Cipher]] = {AES_256_GCM: Aes256Gcm, AEGIS_256X2: Aegis256x2}
