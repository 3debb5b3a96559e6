"""What lies in files, by content: weights, tokenizers and adapters are named by what they are, not by where they lie.

Hashing a large model takes a while (BLAKE2b does about 1 GB/s per thread), so results are kept per file under its
identity on disk. Part of that identity is the change time of the inode, which no program can set back: weights that
were replaced under the same path, size and modification time are read again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvrelay.core.contract.digest import Field, keyed_digest

_READ_BYTES = 1 << 22
_THREADS = 4
Edit = Callable[[Path], bytes | None]


class FileDigests:
    """Digests of file contents, remembered in one JSON file. Safe to use from several threads and processes: whoever
    loses a race computes again."""

    def __init__(self, memory: Path | None) -> None:
        """`memory`: where to remember; None: nowhere. A memory that cannot be read or written costs time only."""
        self._memory = memory
        self._known: dict[str, list[object]] = {}
        if memory is not None:
            with contextlib.suppress(OSError, ValueError):
                known = json.loads(memory.read_text())
                self._known = known if isinstance(known, dict) else {}

    def of_files(self, files: Iterable[Path], *, root: Path, edit: Edit | None = None) -> str:
        """One digest over names (relative to `root`) and contents. `edit` may give other bytes to stand for a file's.

        Raises OSError when a file cannot be read, ValueError when there is none at all.
        """
        ordered = sorted(files)
        if not ordered:
            raise ValueError(f"no files to name in {root}")
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="kvrelay-digest") as threads:
            digests = list(threads.map(lambda file: self._of(file, edit), ordered))
        fields: list[Field] = []
        for file, digest in zip(ordered, digests, strict=True):
            fields += [("name", str(file.relative_to(root)).encode()), ("content", digest)]
        self._remember()
        return keyed_digest(b"", fields, digest_bytes=16).hex()

    def _of(self, file: Path, edit: Edit | None) -> bytes:
        instead = None if edit is None else edit(file)
        if instead is not None:
            return hashlib.blake2b(instead, digest_size=32).digest()
        found = os.stat(file)
        identity = [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
        name = str(file.resolve())
        known = self._known.get(name)
        if known is not None and known[:-1] == identity:
            return bytes.fromhex(str(known[-1]))
        digest = _content(file)
        self._known[name] = [*identity, digest.hex()]
        return digest

    def _remember(self) -> None:
        if self._memory is None:
            return
        with contextlib.suppress(OSError):
            self._memory.parent.mkdir(parents=True, exist_ok=True)
            written = self._memory.with_suffix(f".{os.getpid()}")
            written.write_text(json.dumps(dict(self._known)))
            written.replace(self._memory)


def _content(file: Path) -> bytes:
    hasher = hashlib.blake2b(digest_size=32)
    with file.open("rb", buffering=0) as stream:
        while piece := stream.read(_READ_BYTES):
            hasher.update(piece)
    return hasher.digest()
