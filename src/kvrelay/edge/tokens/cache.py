"""Token ids under digests of what they came from: bounded, least recently used, without any text."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

from kvrelay.core.model.prompt import TokenIds


class TokenCache:
    """Least recently used ids go first; bounded in bytes of ids. May be used by several threads."""

    ENTRY_OVERHEAD_BYTES = 300  # key, array header and place in the order

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[bytes, TokenIds] = OrderedDict()
        self._lock = Lock()

    @property
    def bytes_used(self) -> int:
        return self._bytes

    def get(self, key: bytes) -> TokenIds | None:
        token_ids = self._entries.get(key)
        if token_ids is not None:
            try:
                self._entries.move_to_end(key)
            except KeyError:  # another thread needed the room just now
                pass
        return token_ids

    def put(self, key: bytes, token_ids: TokenIds) -> None:
        cost = self._cost(token_ids)
        if cost > self._max_bytes:
            return
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = token_ids
            self._bytes += cost
            while self._bytes > self._max_bytes:
                _, dropped = self._entries.popitem(last=False)
                self._bytes -= self._cost(dropped)

    def _cost(self, token_ids: TokenIds) -> int:
        return token_ids.nbytes + self.ENTRY_OVERHEAD_BYTES
