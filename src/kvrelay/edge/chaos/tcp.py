"""A proxy for any TCP service, which does to its connections what a script says (`tcp_script.py`).

    async with TcpProxy("127.0.0.1", 8100, script="latency 20ms") as proxy:
        ...                      # clients connect to `proxy.address`
        proxy.do("at 1s blackhole for 2s")
        proxy.state()            # open connections, bytes each way, what is in force

Bytes are passed on as they come and never looked at, so it stands in front of HTTP, TLS, Redis or anything else. Both
ways of a connection end apart, as they do on a wire.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from msgspec import Struct

from kvrelay.edge.chaos.tcp_script import (
    Bandwidth,
    Blackhole,
    ClearAll,
    Direction,
    End,
    Ending,
    Latency,
    Refuse,
    Stall,
    TcpInstruction,
    parse_tcp_script,
)

CHUNK_BYTES = 65_536
CHUNKS_ON_THEIR_WAY = 64  # per connection and way: more than that, and the sender is made to wait
CONNECT_TIMEOUT_S = 10.0
PACE_S = 0.02  # a limited path passes its bytes in pieces of this length

_LINGER_NOT = struct.pack("ii", 1, 0)  # closing sends RST and drops what was not sent


class TcpAction(Struct, frozen=True):
    """Something that the proxy did or saw. `connection` counts from 1."""

    action: str  # begin | end | open | close | reset | truncate | half-close | refused_upstream
    detail: str = ""
    connection: int | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None


class TcpProxy:
    """Valid inside its `async with`. Raises OSError if it cannot listen, ScriptError for a bad script."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        listen_host: str = "127.0.0.1",
        listen_port: int = 0,
        script: str = "",
        seed: int = 0,
        on_action: Callable[[float, TcpAction], None] | None = None,
    ) -> None:
        self._upstream = host, port
        self._listen_host, self.port = listen_host, listen_port
        self._script = parse_tcp_script(script)
        self._chance = random.Random(seed)
        self._on_action = on_action
        self._in_force: list[TcpInstruction] = []
        self._alarms: set[asyncio.TimerHandle] = set()
        self._changed = asyncio.Event()
        self._links: dict[int, _Link] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._listening: asyncio.Task[None] | None = None
        self._free_at = dict.fromkeys(Direction, 0.0)
        self.bytes_passed = dict.fromkeys(Direction, 0)
        self.connections_total = 0

    @property
    def address(self) -> str:
        """HOST:PORT for clients."""
        host = f"[{self._listen_host}]" if ":" in self._listen_host else self._listen_host
        return f"{host}:{self.port}"

    async def __aenter__(self) -> Self:
        self._started_at = time.monotonic()
        await self._listen()
        self._obey(self._script)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        for alarm in self._alarms:
            alarm.cancel()
        if self._listening is not None:
            self._listening.cancel()
        self._deafen()
        for link in tuple(self._links.values()):
            link.reset()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- commands ------------------------------------------------------------------------------------------------

    def do(self, script: str) -> None:
        """Raises ScriptError and then obeys nothing of it."""
        self._obey(parse_tcp_script(script))

    def state(self) -> dict[str, Any]:
        """What is open, what has passed, what is in force."""
        return {
            "open": len(self._links),
            "connections": self.connections_total,
            "bytes_up": self.bytes_passed[Direction.UP],
            "bytes_down": self.bytes_passed[Direction.DOWN],
            "in_force": [instruction.text for instruction in self._in_force],
            "planned": len(self._alarms),
        }

    def _obey(self, instructions: tuple[TcpInstruction, ...]) -> None:
        for instruction in instructions:
            if instruction.at_s:
                self._at(instruction.at_s, lambda instruction=instruction: self._begin(instruction))  # type: ignore[misc]
            else:
                self._begin(instruction)

    def _at(self, delay_s: float, act: Callable[[], None]) -> None:
        def ring() -> None:
            self._alarms.discard(alarm)
            act()

        alarm = asyncio.get_running_loop().call_later(delay_s, ring)
        self._alarms.add(alarm)

    def _begin(self, instruction: TcpInstruction) -> None:
        self._note(TcpAction("begin", instruction.text))
        match instruction.what:
            case ClearAll():
                for alarm in self._alarms:
                    alarm.cancel()
                self._alarms.clear()
                for standing in tuple(self._in_force):
                    self._cease(standing)
            case End(how, None):
                for link in tuple(self._links.values()):
                    link.end(how, instruction.directions)
            case _:
                self._in_force.append(instruction)
                if instruction.for_s is not None:
                    self._at(instruction.for_s, lambda: self._cease(instruction))
                if isinstance(instruction.what, Refuse):
                    self._deafen()
                self._wake()

    def _cease(self, instruction: TcpInstruction) -> None:
        if instruction not in self._in_force:
            return
        self._in_force.remove(instruction)
        self._note(TcpAction("end", instruction.text))
        if isinstance(instruction.what, Blackhole):
            for link in tuple(self._links.values()):
                if link.lost_bytes:
                    link.reset()  # it could only go on with a hole in it
        if isinstance(instruction.what, Refuse) and not self._refuses():
            self._listening = asyncio.get_running_loop().create_task(self._listen())
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # --- what is in force ----------------------------------------------------------------------------------------

    def has(self, kind: type[Stall] | type[Blackhole], direction: Direction) -> bool:
        return any(isinstance(each.what, kind) and direction in each.directions for each in self._in_force)

    def latency_s(self, direction: Direction) -> float:
        """One draw."""
        total_s = 0.0
        for each in self._in_force:
            if isinstance(each.what, Latency) and direction in each.directions:
                total_s += each.what.by_s + self._chance.uniform(0.0, each.what.jitter_s)
        return total_s

    def ending(self, direction: Direction) -> tuple[Ending, int] | None:
        """The end that a connection meets first in this direction."""
        ends = [
            (each.what.how, each.what.after_bytes)
            for each in self._in_force
            if isinstance(each.what, End) and each.what.after_bytes is not None and direction in each.directions
        ]
        return min(ends, key=lambda end: end[1], default=None)

    def bytes_per_s(self, direction: Direction) -> float | None:
        rates = [
            each.what.bytes_per_s
            for each in self._in_force
            if isinstance(each.what, Bandwidth) and direction in each.directions
        ]
        return min(rates, default=None)

    async def until_passing(self, direction: Direction) -> None:
        while self.has(Stall, direction):
            await self._changed.wait()

    async def pace(self, direction: Direction, data: bytes) -> bytes:
        """Waits for the part of the data that may pass now, and answers it."""
        rate = self.bytes_per_s(direction)
        if rate is None:
            return data
        part = data[: max(1, int(rate * PACE_S))]
        now = time.monotonic()
        self._free_at[direction] = max(now, self._free_at[direction]) + len(part) / rate
        await asyncio.sleep(self._free_at[direction] - now)
        return part

    # --- connections ---------------------------------------------------------------------------------------------

    def _refuses(self) -> bool:
        return any(isinstance(each.what, Refuse) for each in self._in_force)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(
            self._accept, self._listen_host, self.port, limit=CHUNK_BYTES, reuse_address=True
        )
        self.port = self._server.sockets[0].getsockname()[1]

    def _deafen(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections_total += 1
        link = _Link(self, self.connections_total, reader, writer)
        self._links[link.number] = link
        self._note(TcpAction("open", connection=link.number))
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await link.run(self._upstream)
        except asyncio.CancelledError:
            pass  # the proxy is being closed
        finally:
            self._tasks.discard(task)
            del self._links[link.number]
            passed = link.passed
            self._note(TcpAction("close", "", link.number, passed[Direction.UP], passed[Direction.DOWN]))

    def _note(self, action: TcpAction) -> None:
        if self._on_action is not None:
            self._on_action(time.monotonic() - self._started_at, action)

    def noted(self, action: str, number: int, detail: str = "") -> None:
        self._note(TcpAction(action, detail, connection=number))


class _Link:
    """One connection of a client, and ours to the server for it."""

    def __init__(
        self, proxy: TcpProxy, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._proxy = proxy
        self.number = number
        self._client = reader, writer
        self._server: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._ended = asyncio.Event()
        self._half_closed: set[Direction] = set()
        self.passed = dict.fromkeys(Direction, 0)
        self.lost_bytes = False

    async def run(self, upstream: tuple[str, int]) -> None:
        """Until both ways have ended, or a fault ended the connection."""
        try:
            if all(self._proxy.has(Blackhole, direction) for direction in Direction):
                self.lost_bytes = True  # nobody will ever hear of this client
                await self._ended.wait()
                return
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    self._server = await asyncio.open_connection(*upstream, limit=CHUNK_BYTES)
            except (OSError, TimeoutError) as problem:
                self._proxy.noted("refused_upstream", self.number, str(problem) or type(problem).__name__)
                self.reset()
                return
            await self._pass_both_ways(self._client, self._server)
        finally:
            for _, writer in filter(None, (self._client, self._server)):
                writer.close()

    async def _pass_both_ways(
        self,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        server: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        ways = [
            asyncio.ensure_future(self._way(Direction.UP, client[0], server[1])),
            asyncio.ensure_future(self._way(Direction.DOWN, server[0], client[1])),
        ]
        ended: asyncio.Future[Any] = asyncio.ensure_future(self._ended.wait())
        both: asyncio.Future[Any] = asyncio.ensure_future(asyncio.wait(ways))
        try:
            await asyncio.wait([ended, both], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*ways, ended, both):
                task.cancel()
            await asyncio.gather(*ways, ended, both, return_exceptions=True)

    async def _way(self, direction: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Reading and writing are apart: a delay must not become a limit of the rate."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(CHUNKS_ON_THEIR_WAY)
        reading = asyncio.ensure_future(self._read(direction, reader, under_way))
        try:
            await self._write(direction, writer, under_way)
        except (ConnectionError, OSError):
            self.reset()  # one side is gone: the other learns it the same way
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(
        self, direction: Direction, reader: asyncio.StreamReader, under_way: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        due = 0.0
        while True:
            try:
                data = await reader.read(CHUNK_BYTES)
            except (ConnectionError, OSError):
                self.reset()
                return
            due = max(due, time.monotonic() + self._proxy.latency_s(direction))
            await under_way.put((due, data))
            if not data:
                return

    async def _write(
        self, direction: Direction, writer: asyncio.StreamWriter, under_way: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        while True:
            due, data = await under_way.get()
            if (early_s := due - time.monotonic()) > 0:
                await asyncio.sleep(early_s)
            await self._proxy.until_passing(direction)
            if not data:
                self._finish(direction, writer)
                return
            while data and not self._ended.is_set():
                part = await self._proxy.pace(direction, data)
                await self._proxy.until_passing(direction)
                data = data[len(part) :]
                await self._deliver(direction, writer, part)

    async def _deliver(self, direction: Direction, writer: asyncio.StreamWriter, part: bytes) -> None:
        if self._proxy.has(Blackhole, direction):
            self.lost_bytes = True
            return
        if direction in self._half_closed:
            return
        ending = self._proxy.ending(direction)
        if ending is not None:
            part = part[: max(0, ending[1] - self.passed[direction])]
        writer.write(part)
        self.passed[direction] += len(part)
        self._proxy.bytes_passed[direction] += len(part)
        await writer.drain()
        if ending is not None and self.passed[direction] >= ending[1]:
            self.end(ending[0], (direction,))

    def _finish(self, direction: Direction, writer: asyncio.StreamWriter) -> None:
        if direction not in self._half_closed and not self._proxy.has(Blackhole, direction):
            _write_eof(writer)

    # --- endings -------------------------------------------------------------------------------------------------

    def end(self, how: Ending, directions: tuple[Direction, ...]) -> None:
        self._proxy.noted(how.value, self.number)
        match how:
            case Ending.RESET:
                self.reset()
            case Ending.TRUNCATE:
                self._ended.set()
            case Ending.HALF_CLOSE:
                for direction in directions:
                    receiver = self._server if direction is Direction.UP else self._client
                    if receiver is not None and direction not in self._half_closed:
                        self._half_closed.add(direction)
                        _write_eof(receiver[1])

    def reset(self) -> None:
        """RST to both sides."""
        for _, writer in filter(None, (self._client, self._server)):
            raw = writer.get_extra_info("socket")
            if raw is not None and raw.fileno() >= 0:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
            writer.transport.abort()
        self._ended.set()


def _write_eof(writer: asyncio.StreamWriter) -> None:
    try:
        if writer.can_write_eof() and not writer.is_closing():
            writer.write_eof()
    except OSError:
        pass  # it is gone, which is more than was asked
