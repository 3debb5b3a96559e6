"""Serves a store to peers: a thread per connection, because bulk bytes are what threads are good at here.

A connection that sends no proper greeting is closed without an answer. How many there may be is bounded, as is the
memory that their requests may announce.
"""

from __future__ import annotations

import hmac
import logging
import socket
import ssl
import struct
import threading
import time

import msgspec

from kvrelay.edge.stores.frames import GREETING, TOKEN_BYTES, Op, Request, Status, Wire, token_bytes
from kvrelay.edge.stores.peer import ABSENT_SIZE
from kvrelay.edge.stores.store import NoSpace, Store, StoreError, StoreTimeout, WriteOutcome

GREETING_TIMEOUT_S = 5.0
IDLE_TIMEOUT_S = 600.0
MAX_CONNECTIONS = 256
MAX_DEADLINE_S = 60.0

log = logging.getLogger("kvrelay.store")


class StoreServer:
    """Listens from construction on. `port` is the one really taken."""

    def __init__(
        self,
        store: Store,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        max_object_bytes: int = 64 << 20,
    ) -> None:
        self._store, self._token, self._tls = store, token_bytes(token), tls
        self._max_object_bytes = max_object_bytes
        self._listener = socket.create_server((host, port), backlog=128, reuse_port=False)
        self.port: int = self._listener.getsockname()[1]
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closing = False
        self._acceptor = threading.Thread(target=self._accept, name="kvrelay-store-accept", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Stop listening and cut every connection."""
        self._closing = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                full = len(self._connections) >= MAX_CONNECTIONS
                if not full:
                    self._connections.add(connection)
            if full:
                log.warning("more than %d connections to the store; one is refused", MAX_CONNECTIONS)
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        used = connection
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(GREETING_TIMEOUT_S)
            if self._tls is not None:
                used = self._tls.wrap_socket(connection, server_side=True)
            self._converse(Wire(used))
        except (StoreError, OSError):
            pass  # the peer left, or fell silent
        finally:
            with self._lock:
                self._connections.discard(connection)
            used.close()

    def _converse(self, wire: Wire) -> None:
        soon = time.monotonic() + GREETING_TIMEOUT_S
        greeting = bytes(wire.take(len(GREETING) + TOKEN_BYTES, deadline=soon))
        if not hmac.compare_digest(greeting, GREETING + self._token):
            return
        while not self._closing:
            request = wire.hear(deadline=time.monotonic() + IDLE_TIMEOUT_S)
            deadline_s = MAX_DEADLINE_S if request is None else min(MAX_DEADLINE_S, request.left_ms / 1000)
            deadline = time.monotonic() + deadline_s
            if request is None or request.content_bytes > self._max_object_bytes:
                wire.reply(Status.MALFORMED, 0, (), deadline=deadline)
                return
            self._answer(wire, request, deadline)

    def _answer(self, wire: Wire, request: Request, deadline: float) -> None:
        content = wire.take(request.content_bytes, deadline=deadline)
        try:
            status, number, parts = self._do(request, content, max(0.001, deadline - time.monotonic()))
        except NoSpace:
            status, number, parts = Status.NO_SPACE, 0, ()
        except StoreTimeout:
            status, number, parts = Status.TIMEOUT, 0, ()
        except StoreError:
            status, number, parts = Status.UNAVAILABLE, 0, ()
        wire.reply(status, number, parts, deadline=deadline)

    def _do(
        self, request: Request, content: bytearray, deadline_s: float
    ) -> tuple[Status, int, tuple[bytes | bytearray | memoryview, ...]]:
        names = request.names
        match request.op:
            case Op.SIZES:
                sizes = self._store.sizes(names, deadline_s=deadline_s)
                packed = b"".join(struct.pack("<Q", ABSENT_SIZE if size is None else size) for size in sizes)
                return Status.OK, len(sizes), (packed,)
            case Op.READ if len(names) == 1:
                found = self._store.read(names[0], deadline_s=deadline_s)
                return (Status.ABSENT, 0, ()) if found is None else (Status.OK, 0, (found,))
            case Op.WRITE if len(names) == 1:
                outcome = self._store.write(
                    names[0], (content,), only_if_absent=request.only_if_absent, deadline_s=deadline_s
                )
                return (Status.EXISTS if outcome is WriteOutcome.EXISTS else Status.OK), 0, ()
            case Op.DELETE:
                return Status.OK, self._store.delete(names, deadline_s=deadline_s), ()
            case Op.SCAN if len(names) == 1:
                infos = list(self._store.scan(names[0], deadline_s=deadline_s))
                return Status.OK, len(infos), (msgspec.msgpack.encode(infos),)
            case Op.PING:
                self._store.ping(deadline_s=deadline_s)
                return Status.OK, 0, ()
            case Op.STATS:
                return Status.OK, 0, (msgspec.msgpack.encode(self._store.stats(deadline_s=deadline_s)),)
        return Status.MALFORMED, 0, ()
