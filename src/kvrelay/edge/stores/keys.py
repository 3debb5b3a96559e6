"""Encryption keys: a ring with ids, from a file, the environment or a command; one derived key per tenant and epoch.

The text of a ring has one key a line, `ID HEX` with 64 hex digits. The first line's key encrypts, all decrypt: to
rotate, put a new first line; to retire a key, delete its line, and what it encrypted is gone for good. Losing a
tenant's derived key does not happen by accident, because it is computed from the ring and the tenant's secret whenever
it is needed.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import threading
from pathlib import Path

from kvrelay.edge.stores.ciphers import AES_256_GCM, CIPHERS, KEY_BYTES, Cipher
from kvrelay.edge.stores.extras import need

COMMAND_TIMEOUT_S = 10.0
_MAX_DERIVED = 4096  # ciphers kept ready; another one costs a few microseconds


class KeyRingError(ValueError):
    """The keys as given cannot be used. The message names the place and never the key."""


class KeyRing:
    """Keys by id. An empty ring means: no encryption. `cipher` is what new objects are encrypted by."""

    def __init__(self, keys: dict[str, bytes], *, cipher: str = AES_256_GCM) -> None:
        self._keys = keys
        self.active_cipher = cipher
        if keys:
            CIPHERS[cipher](bytes(KEY_BYTES))  # a missing package shows now
        self.active_id = next(iter(keys), "")
        self._ciphers: dict[tuple[str, str, bytes, bytes, int], Cipher] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"KeyRing(ids={list(self._keys)})"

    @property
    def encrypts(self) -> bool:
        return bool(self._keys)

    def knows(self, key_id: str) -> bool:
        return key_id in self._keys

    def cipher(self, name: str, key_id: str, *, tenant_key: bytes, tenant_tag: bytes, epoch: int) -> Cipher:
        """The cipher of that name under the key of that tenant and epoch (HKDF-SHA256, RFC 5869; its secret is the
        salt)."""
        known_as = (name, key_id, tenant_key, tenant_tag, epoch)
        cipher = self._ciphers.get(known_as)
        if cipher is None:
            hashes = need("cryptography.hazmat.primitives.hashes", extra="store", purpose="encryption")
            hkdf = need("cryptography.hazmat.primitives.kdf.hkdf", extra="store", purpose="encryption")
            info = b"kvrelay store object" + name.encode() + tenant_tag + epoch.to_bytes(8, "big")
            derive = hkdf.HKDF(algorithm=hashes.SHA256(), length=KEY_BYTES, salt=tenant_key or None, info=info)
            cipher = CIPHERS[name](derive.derive(self._keys[key_id]))
            with self._lock:
                if len(self._ciphers) >= _MAX_DERIVED:
                    self._ciphers.clear()
                self._ciphers[known_as] = cipher
        return cipher


def load_key_ring(source: str, *, cipher: str = AES_256_GCM) -> KeyRing:
    """`none`, `file:PATH`, `env:NAME` or `command:WORDS` (run without a shell, its output is the ring)."""
    scheme, _, rest = source.partition(":")
    if source in ("", "none"):
        return KeyRing({})
    if scheme == "file":
        return parse_key_ring(_read_file(Path(rest)), source=source, cipher=cipher)
    if scheme == "env":
        text = os.environ.get(rest)
        if text is None:
            raise KeyRingError(f"environment variable `{rest}` is not set (from `{source}`)")
        return parse_key_ring(text, source=source, cipher=cipher)
    if scheme == "command":
        program = shlex.split(rest)[0] if rest.split() else ""
        return parse_key_ring(_run(rest), source=f"command:{program}", cipher=cipher)
    raise KeyRingError(f"`{scheme}:` is no place for keys; legal: none, file:PATH, env:NAME, command:PROGRAM ARGUMENTS")


def parse_key_ring(text: str, *, source: str, cipher: str = AES_256_GCM) -> KeyRing:
    keys: dict[str, bytes] = {}
    for number, line in enumerate(text.replace(";", "\n").splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or len(words[0]) > 32 or len(words[1]) != 2 * KEY_BYTES:
            raise KeyRingError(f"line {number} of {source} is not `ID` and {2 * KEY_BYTES} hex digits")
        if words[0] in keys:
            raise KeyRingError(f"line {number} of {source} repeats the id `{words[0]}`")
        try:
            keys[words[0]] = bytes.fromhex(words[1])
        except ValueError:
            raise KeyRingError(f"line {number} of {source} is not hexadecimal") from None
    if not keys:
        raise KeyRingError(f'{source} has no key; make one with: echo "k1 $(openssl rand -hex {KEY_BYTES})"')
    return KeyRing(keys, cipher=cipher)


def _read_file(path: Path) -> str:
    try:
        if path.stat().st_mode & 0o077:
            raise KeyRingError(f"{path} can be read by others; chmod 600 {path}")
        return path.read_text()
    except OSError as error:
        raise KeyRingError(f"cannot read {path}: {error.strerror}") from error


def _run(command: str) -> str:
    try:
        done = subprocess.run(
            shlex.split(command), capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        raise KeyRingError(f"the key command did not run: {type(error).__name__}") from error
    if done.returncode:
        raise KeyRingError(f"the key command ended with status {done.returncode}")
    return done.stdout
