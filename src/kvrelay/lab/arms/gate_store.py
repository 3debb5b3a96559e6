"""Gate files on disk: read, locked, kept with a run, and asked afterwards whether they are still the same."""

from __future__ import annotations

import datetime
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from kvrelay import __version__
from kvrelay.core.gates.evidence import Registration
from kvrelay.core.gates.gate_file import GateFile, parse_gates
from kvrelay.core.gates.lock import GateLock, LockUnreadable, parse_lock, registration
from kvrelay.lab.arms.manifest import GateFacts, Manifest

KEPT, LOCK_SUFFIX = "gates.toml", ".lock"


class GateStore(Struct, frozen=True, eq=False):
    """A gate file with its lock, as both are now. A lock that cannot be read is none."""

    file: GateFile
    text: bytes
    lock: GateLock | None

    def facts(self) -> GateFacts:
        file = self.file
        return GateFacts(file.title, file.digest, file.baseline_run, file.candidate, file.baseline, self.lock)

    def keep(self, folder: Path) -> None:
        (folder / KEPT).write_bytes(self.text)
        lock = folder / (KEPT + LOCK_SUFFIX)
        if self.lock is None:
            lock.unlink(missing_ok=True)
        else:
            _write_lock(lock, self.lock)


def read_gates(path: Path) -> GateStore:
    """Raises OSError or GateError."""
    text = path.read_bytes()
    return GateStore(parse_gates(text), text, _read_lock(lock_path(path)))


def lock_gates(path: Path) -> GateLock:
    """Raises OSError or GateError. A lock of the same bytes stays as it is: its time is worth more than a new one's."""
    store = read_gates(path)
    if store.lock is not None and store.lock.sha256 == store.file.digest:
        return store.lock
    now_s = time.time()
    said = datetime.datetime.fromtimestamp(now_s, datetime.UTC).isoformat(timespec="seconds")
    lock = GateLock(store.file.digest, now_s, said, __version__)
    _write_lock(lock_path(path), lock)
    return lock


def lock_path(path: Path) -> Path:
    return path.with_name(path.name + LOCK_SUFFIX)


def registration_of(manifest: Manifest, kept: GateStore | None) -> Registration:
    """Of the gates that a run was started with. `kept` is what lies in its folder now: other bytes are a change."""
    stated = manifest.stated.gates
    if stated is None:
        return Registration.NO_GATES
    if kept is None or kept.file.digest != stated.sha256:
        return Registration.CHANGED
    first_s = min((facts.started_s for facts in manifest.observed), default=0.0)
    return registration(stated.sha256, stated.lock, first_request_s=first_s)


def _read_lock(path: Path) -> GateLock | None:
    try:
        return parse_lock(path.read_bytes())
    except (FileNotFoundError, LockUnreadable):
        return None


def _write_lock(path: Path, lock: GateLock) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(lock), indent=2) + b"\n")
