"""Valkey or Redis, one server or a cluster.

Values of up to 4 MiB go at several GB/s over loopback; beyond that servers and kernels get slow, so larger payloads are
split before they come here. In a cluster each name goes to the node that has its slot; a node that says MOVED has the
map read again.
"""

from __future__ import annotations

import binascii
import functools
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, TypeVar

from kvrelay.edge.stores.resp import Connection, Refusal, Reply, encode_around, refused
from kvrelay.edge.stores.store import (
    DEFAULT_DEADLINE_S,
    Buffer,
    ObjectInfo,
    Store,
    StoreError,
    StoreStats,
    StoreUnavailable,
    WriteOutcome,
    total_bytes,
)

NAME_PREFIX = b"kvrelay:"
SLOTS = 16_384
MAX_IDLE_CONNECTIONS = 16
_SCAN_COUNT = b"500"
_MAX_REDIRECTS = 3
Address = tuple[str, int]
Result = TypeVar("Result")


class ValkeyNode:
    """One server and the idle connections to it."""

    def __init__(
        self, address: Address, *, database: int, password: str | None, username: str | None, tls: ssl.SSLContext | None
    ) -> None:
        self.address = address
        self._database, self._password, self._username, self._tls = database, password, username, tls
        self._idle: list[Connection] = []
        self._lock = threading.Lock()
        self._closed = False

    def run(self, use: Callable[[Connection], Result], *, deadline: float) -> Result:
        """Use a connection. One that lay idle may have died unseen (the server was restarted): then once more, anew."""
        kept = self._take()
        if kept is not None:
            try:
                return self._use(kept, use)
            except StoreUnavailable:
                self._drop_idle()
        return self._use(self._connect(deadline), use)

    def close(self) -> None:
        self._closed = True
        self._drop_idle()

    def _use(self, connection: Connection, use: Callable[[Connection], Result]) -> Result:
        try:
            result = use(connection)
        except Refusal:
            self._give_back(connection)
            raise
        except BaseException:
            connection.close()
            raise
        self._give_back(connection)
        return result

    def _take(self) -> Connection | None:
        with self._lock:
            if self._closed:
                raise StoreUnavailable("the store is closed")
            return self._idle.pop() if self._idle else None

    def _give_back(self, connection: Connection) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < MAX_IDLE_CONNECTIONS:
                self._idle.append(connection)
                return
        connection.close()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _connect(self, deadline: float) -> Connection:
        connection = Connection(*self.address, deadline=deadline, tls=self._tls)
        try:
            if self._password is not None:
                names = [self._username.encode()] if self._username else []
                connection.call(b"AUTH", *names, self._password.encode(), deadline=deadline)
            if self._database:
                connection.call(b"SELECT", str(self._database).encode(), deadline=deadline)
        except BaseException as error:
            connection.close()
            if isinstance(error, Refusal):
                raise refused(error) from None
            raise
        return connection


class ValkeyStore(Store):
    """See the module text."""

    kind: ClassVar[str] = "valkey"

    def __init__(
        self,
        host: str,
        port: int,
        *,
        database: int = 0,
        cluster: bool = False,
        password: str | None = None,
        username: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._cluster = cluster
        self._seed = (host, port)
        self._new_node = functools.partial(ValkeyNode, database=database, password=password, username=username, tls=tls)
        self._nodes: dict[Address, ValkeyNode] = {self._seed: self._new_node(self._seed)}
        self._slots: list[Address] | None = None
        self._lock = threading.Lock()

    def sizes(self, keys: Sequence[bytes], *, deadline_s: float) -> list[int | None]:
        deadline = time.monotonic() + deadline_s
        sizes: list[int | None] = [None] * len(keys)
        for address, places in self._by_node(keys, deadline).items():
            commands = [(b"STRLEN", NAME_PREFIX + keys[i]) for i in places]
            replies = self._pipeline(address, commands, deadline)
            for i, reply in zip(places, replies, strict=True):
                reply = self._settled(keys[i], commands[0][0], reply, deadline)
                sizes[i] = reply if isinstance(reply, int) and reply > 0 else None
        return sizes

    def read(self, key: bytes, *, deadline_s: float) -> Buffer | None:
        deadline = time.monotonic() + deadline_s
        reply = self._run(key, lambda c: c.call(b"GET", NAME_PREFIX + key, deadline=deadline), deadline)
        return reply if isinstance(reply, bytes) else None

    def read_into(self, key: bytes, parts: Sequence[memoryview], *, deadline_s: float) -> int | None:
        deadline = time.monotonic() + deadline_s
        return self._run(key, lambda c: c.get_into(NAME_PREFIX + key, parts, deadline=deadline), deadline)

    def write(
        self,
        key: bytes,
        parts: Sequence[Buffer],
        *,
        only_if_absent: bool,
        deadline_s: float,
        ttl_s: float | None = None,
    ) -> WriteOutcome:
        deadline = time.monotonic() + deadline_s
        after = [b"NX"] if only_if_absent else []
        if ttl_s is not None:
            after += [b"PX", b"%d" % max(1, int(ttl_s * 1000))]
        before, behind = encode_around((b"SET", NAME_PREFIX + key), total_bytes(parts), after)

        def set_value(connection: Connection) -> Reply:
            connection.send([before, *parts, behind], deadline=deadline)
            reply = connection.reply(deadline=deadline)
            if isinstance(reply, Refusal):
                raise reply
            return reply

        return WriteOutcome.EXISTS if self._run(key, set_value, deadline) is None else WriteOutcome.WRITTEN

    def delete(self, keys: Sequence[bytes], *, deadline_s: float) -> int:
        deadline = time.monotonic() + deadline_s
        gone = 0
        for address, places in self._by_node(keys, deadline).items():
            commands = [(b"UNLINK", NAME_PREFIX + keys[i]) for i in places]
            for i, reply in zip(places, self._pipeline(address, commands, deadline), strict=True):
                reply = self._settled(keys[i], commands[0][0], reply, deadline)
                gone += reply if isinstance(reply, int) else 0
        return gone

    def scan(self, prefix: bytes = b"", *, deadline_s: float) -> Iterator[ObjectInfo]:
        pattern = NAME_PREFIX + _glob_escaped(prefix) + b"*"
        for address in self._masters(time.monotonic() + deadline_s):
            cursor = b"0"
            while True:
                deadline = time.monotonic() + deadline_s
                cursor, infos = self._scan_page(address, cursor, pattern, deadline)
                yield from infos
                if cursor == b"0":
                    break

    def ping(self, *, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        for address in self._masters(deadline):
            self._command(address, (b"PING",), deadline)

    def stats(self, *, deadline_s: float = DEFAULT_DEADLINE_S) -> StoreStats:
        deadline = time.monotonic() + deadline_s
        used, limit, nodes = 0, 0, {}
        for address in self._masters(deadline):
            info = _info(self._command(address, (b"INFO",), deadline))
            used += int(info.get("used_memory", 0))
            limit += int(info.get("maxmemory", 0))
            nodes[f"{address[0]}:{address[1]}"] = info.get("valkey_version") or info.get("redis_version")
        objects = sum(1 for _ in self.scan(deadline_s=deadline_s))
        return StoreStats(objects, used, limit or None, {"servers": nodes})

    def close(self) -> None:
        for node in list(self._nodes.values()):
            node.close()

    # --- which node --------------------------------------------------------------------------------------------------

    def _run(self, key: bytes, use: Callable[[Connection], Result], deadline: float) -> Result:
        """On the node that has the name; raises only StoreErrors."""
        try:
            return self._node(self._address(key, deadline)).run(use, deadline=deadline)
        except Refusal as refusal:
            return self._again(key, refusal, deadline, use)

    def _again(self, key: bytes, refusal: Refusal, deadline: float, use: Callable[[Connection], Result]) -> Result:
        """After a refusal: follow a redirection, or raise what the refusal means."""
        for _ in range(_MAX_REDIRECTS):
            if not self._cluster or refusal.code not in ("MOVED", "ASK"):
                raise refused(refusal) from None
            if refusal.code == "MOVED":
                self._slots = None
            host, _, port = str(refusal).split(" ")[2].rpartition(":")
            node = self._node((host or self._seed[0], int(port)))
            try:
                if refusal.code == "ASK":
                    return node.run(_asking(use, deadline), deadline=deadline)
                return node.run(use, deadline=deadline)
            except Refusal as further:
                refusal = further
        raise StoreUnavailable("the cluster sent this name from node to node")

    def _command(self, address: Address, words: Sequence[bytes], deadline: float) -> Reply:
        """A command to one node; raises only StoreErrors."""
        try:
            return self._node(address).run(lambda c: c.call(*words, deadline=deadline), deadline=deadline)
        except Refusal as refusal:
            raise refused(refusal) from None

    def _pipeline(self, address: Address, commands: Sequence[Sequence[bytes]], deadline: float) -> list[Reply]:
        return self._node(address).run(lambda c: c.pipeline(commands, deadline=deadline), deadline=deadline)

    def _settled(self, key: bytes, command: bytes, reply: Reply, deadline: float) -> Reply:
        """One reply of a pipeline; a redirected name is asked for again."""
        if not isinstance(reply, Refusal):
            return reply
        return self._again(key, reply, deadline, lambda c: c.call(command, NAME_PREFIX + key, deadline=deadline))

    def _node(self, address: Address) -> ValkeyNode:
        with self._lock:
            if address not in self._nodes:
                self._nodes[address] = self._new_node(address)
            return self._nodes[address]

    def _address(self, key: bytes, deadline: float) -> Address:
        if not self._cluster:
            return self._seed
        slots = self._slots
        if slots is None:
            slots = self._slots = self._read_slots(deadline)
        return slots[slot(NAME_PREFIX + key)]

    def _by_node(self, keys: Sequence[bytes], deadline: float) -> dict[Address, list[int]]:
        places: dict[Address, list[int]] = {}
        for i, key in enumerate(keys):
            places.setdefault(self._address(key, deadline), []).append(i)
        return places

    def _masters(self, deadline: float) -> list[Address]:
        return list(dict.fromkeys(self._read_slots(deadline))) if self._cluster else [self._seed]

    def _read_slots(self, deadline: float) -> list[Address]:
        """Which master has each slot, from the first node that answers."""
        fault: StoreError = StoreUnavailable("no node of the cluster answered")
        for address in list(self._nodes):
            try:
                reply = self._node(address).run(
                    lambda c: c.call(b"CLUSTER", b"SLOTS", deadline=deadline), deadline=deadline
                )
                return self._slot_table(reply, asked=address)
            except Refusal as refusal:
                fault = StoreUnavailable(f"the server refused: {refusal.code}")
            except StoreError as error:
                fault = error
        raise fault

    def _slot_table(self, reply: Reply, *, asked: Address) -> list[Address]:
        table: list[Address | None] = [None] * SLOTS
        for entry in reply if isinstance(reply, list) else []:
            match entry:
                case [int(first), int(last), [host, int(port), *_], *_]:
                    name = host.decode() if isinstance(host, bytes) and host else asked[0]
                    table[first : last + 1] = [(name, port)] * (last + 1 - first)
        known = [address for address in table if address is not None]
        if len(known) != SLOTS:
            raise StoreUnavailable(f"the cluster serves {len(known)} of {SLOTS} slots")
        return known

    def _scan_page(
        self, address: Address, cursor: bytes, pattern: bytes, deadline: float
    ) -> tuple[bytes, list[ObjectInfo]]:
        page = self._command(address, (b"SCAN", cursor, b"MATCH", pattern, b"COUNT", _SCAN_COUNT), deadline)
        match page:
            case [bytes(following), list(names)]:
                named = [name for name in names if isinstance(name, bytes)]
                lengths = self._pipeline(address, [(b"STRLEN", name) for name in named], deadline)
                infos = [
                    ObjectInfo(name[len(NAME_PREFIX) :], size)
                    for name, size in zip(named, lengths, strict=True)
                    if isinstance(size, int) and size > 0
                ]
                return following, infos
        raise StoreUnavailable("the server's answer to SCAN is not one")


def _asking(use: Callable[[Connection], Result], deadline: float) -> Callable[[Connection], Result]:
    """The same at a node that takes over the slot just now (`ASK`)."""

    def ask(connection: Connection) -> Result:
        connection.call(b"ASKING", deadline=deadline)
        return use(connection)

    return ask


def slot(name: bytes) -> int:
    """The cluster slot of a name (CRC-16/XMODEM of it, or of its first non-empty {tag})."""
    start = name.find(b"{")
    if start >= 0:
        end = name.find(b"}", start + 1)
        if end > start + 1:
            name = name[start + 1 : end]
    return binascii.crc_hqx(name, 0) % SLOTS


def _glob_escaped(prefix: bytes) -> bytes:
    return b"".join(b"\\" + bytes([byte]) if byte in b"*?[]\\^" else bytes([byte]) for byte in prefix)


def _info(reply: Reply) -> dict[str, str]:
    text = reply.decode(errors="replace") if isinstance(reply, bytes) else ""
    pairs = (line.partition(":") for line in text.splitlines())
    return {name: value for name, colon, value in pairs if colon}
