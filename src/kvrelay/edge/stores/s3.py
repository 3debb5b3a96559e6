"""S3-compatible object storage.

Objects are created only if absent by a conditional PUT (`If-None-Match: *`), which every current service knows; where
one does not, the write is refused by it and reported as unavailable rather than done unconditionally.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, ClassVar

from kvrelay.edge.stores.extras import need
from kvrelay.edge.stores.memory import fill
from kvrelay.edge.stores.store import (
    DEFAULT_DEADLINE_S,
    Buffer,
    NoSpace,
    ObjectInfo,
    Store,
    StoreError,
    StoreStats,
    StoreTimeout,
    StoreUnavailable,
    WriteOutcome,
)

_ASKING_THREADS = 8  # HEAD requests of one look-up that are under way at once
_FULL = ("InsufficientStorage", "QuotaExceeded", "507", "XMinioStorageFull", "EntityTooLarge")
_LATE = ("timed out", "TimedOut")
_STATUS = re.compile(r"status code: (?P<status>\d{3} [A-Za-z ]+)")

log = logging.getLogger("kvrelay.store")


class S3Store(Store):
    """One bucket and prefix. Its calls are over by the client's own time-out, which is set once: not `bounded`."""

    kind: ClassVar[str] = "s3"
    bounded: ClassVar[bool] = False

    def __init__(
        self,
        bucket: str,
        prefix: str,
        *,
        endpoint: str | None,
        region: str,
        timeout_s: float,
        access_key: str | None = None,
        secret_key: str | None = None,
    ) -> None:
        self._obstore = need("obstore", extra="s3", purpose="an S3 tier")
        stores = need("obstore.store", extra="s3", purpose="an S3 tier")
        self._faults = need("obstore.exceptions", extra="s3", purpose="an S3 tier")
        options: dict[str, Any] = {"region": region, "virtual_hosted_style_request": False}
        if endpoint is not None:
            options["endpoint"] = endpoint
        if access_key is not None and secret_key is not None:
            options |= {"access_key_id": access_key, "secret_access_key": secret_key}
        self._store = stores.S3Store(
            bucket,
            prefix=prefix or None,
            config=options,
            client_options={
                "timeout": timedelta(seconds=timeout_s),
                "connect_timeout": timedelta(seconds=timeout_s),
                "allow_http": endpoint is not None and endpoint.startswith("http://"),
            },
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=timeout_s)},
        )
        self._asking = ThreadPoolExecutor(_ASKING_THREADS, thread_name_prefix="kvrelay-s3")
        self._closed = False

    def sizes(self, keys: Sequence[bytes], *, deadline_s: float) -> list[int | None]:
        self._check_open()
        if len(keys) == 1:
            return [self._size(keys[0])]
        return list(self._asking.map(self._size, keys))

    def read(self, key: bytes, *, deadline_s: float) -> Buffer | None:
        until_s = time.monotonic() + deadline_s
        try:
            found = self._call(lambda: self._obstore.get(self._store, _path(key)).bytes())
        except FileNotFoundError:
            return None
        if time.monotonic() > until_s:
            raise StoreTimeout("the object came after the deadline")
        return memoryview(found)

    def read_into(self, key: bytes, parts: Sequence[memoryview], *, deadline_s: float) -> int | None:
        found = self.read(key, deadline_s=deadline_s)
        if found is None:
            return None
        view = memoryview(found)
        fill(parts, view)
        return view.nbytes

    def write(
        self,
        key: bytes,
        parts: Sequence[Buffer],
        *,
        only_if_absent: bool,
        deadline_s: float,
        ttl_s: float | None = None,
    ) -> WriteOutcome:
        content = parts[0] if len(parts) == 1 else b"".join(parts)
        mode = "create" if only_if_absent else "overwrite"
        try:
            self._call(lambda: self._obstore.put(self._store, _path(key), content, mode=mode, use_multipart=False))
        except FileExistsError:
            return WriteOutcome.EXISTS
        except FileNotFoundError:
            raise StoreUnavailable("the bucket does not exist") from None
        return WriteOutcome.WRITTEN

    def delete(self, keys: Sequence[bytes], *, deadline_s: float) -> int:
        there = [
            key for key, size in zip(keys, self.sizes(keys, deadline_s=deadline_s), strict=True) if size is not None
        ]
        for key in there:
            try:
                self._call(lambda k=key: self._obstore.delete(self._store, _path(k)))
            except FileNotFoundError:
                pass
        return len(there)

    def scan(self, prefix: bytes = b"", *, deadline_s: float) -> Iterator[ObjectInfo]:
        """S3 lists by whole path segments only, here the first eight bytes of the key; the rest is compared here."""
        segment = _folder(prefix) if len(prefix) >= _FOLDER_BYTES else None
        pages = self._call(lambda: self._obstore.list(self._store, prefix=segment))
        while True:
            page = self._call(lambda: next(pages, None))
            if page is None:
                return
            for entry in page:
                key = _key(entry["path"])
                if key is not None and key.startswith(prefix):
                    yield ObjectInfo(key, entry["size"], entry["last_modified"].timestamp())

    def ping(self, *, deadline_s: float) -> None:
        self._size(b"ping")

    def stats(self, *, deadline_s: float = DEFAULT_DEADLINE_S) -> StoreStats:
        sizes = [info.stored_bytes for info in self.scan(deadline_s=deadline_s)]
        return StoreStats(len(sizes), sum(sizes), None)

    def close(self) -> None:
        self._closed = True
        self._asking.shutdown(wait=False, cancel_futures=True)

    def _size(self, key: bytes) -> int | None:
        try:
            size: int = self._call(lambda: self._obstore.head(self._store, _path(key)))["size"]
        except FileNotFoundError:
            return None
        return size

    def _call(self, call: Any) -> Any:
        """In a store's words; absence and existence stay Python's own FileNotFoundError and FileExistsError."""
        self._check_open()
        try:
            return call()
        except self._faults.NotFoundError as error:
            raise FileNotFoundError from error
        except (self._faults.AlreadyExistsError, self._faults.PreconditionError) as error:
            raise FileExistsError from error
        except (FileNotFoundError, FileExistsError, StoreError):
            raise
        except Exception as error:  # the library's faults share no base beyond this
            raise _translated(error) from error

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable("the store is closed")


_FOLDER_BYTES = 8


def _path(key: bytes) -> str:
    """Tenant's tag as a folder, then the rest: deleting a tenant is one listing."""
    return f"{_folder(key)}/{key[_FOLDER_BYTES:].hex() or '_'}"


def _folder(key: bytes) -> str:
    return key[:_FOLDER_BYTES].hex()


def _key(path: str) -> bytes | None:
    """The key of a path; None for an object that is not ours."""
    folder, _, rest = path.rpartition("/")
    try:
        return bytes.fromhex(folder.rpartition("/")[2]) + (b"" if rest == "_" else bytes.fromhex(rest))
    except ValueError:
        return None


def _translated(error: Exception) -> StoreError:
    text = str(error).partition("Debug source")[0]  # what follows names its settings, time-outs among them
    if any(sign in text for sign in _FULL):
        return NoSpace("the service is full")
    if any(sign in text for sign in _LATE):
        return StoreTimeout("the service did not answer in time")
    log.debug("s3: %s", text)
    said = _STATUS.search(text)
    short = said["status"] if said else text.splitlines()[0][:160] if text else type(error).__name__
    return StoreUnavailable(f"the service failed: {short}")


def credentials() -> tuple[str | None, str | None]:
    """From the environment, as every S3 tool has them."""
    return os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
