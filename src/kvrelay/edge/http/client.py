"""The upstream side: kept connections per origin, one call per request, answered by callbacks.

A call goes through `accepted -> head -> data* -> end`, or ends with one `error` at any point; after `abort()` nothing
is called any more. Within one read the callbacks come in order and body pieces are joined, so a relay writes once.

A kept connection may have been closed by the worker at the moment we reuse it. Such a call is repeated once on a fresh
connection, but only if not one byte came back and the failure followed the write at once; anything later may mean that
the worker had begun, and then the router decides.

The body of a request may follow its head piece by piece (`Call.send`). Such a call has a connection of its own from the
start, as what has been sent of it cannot be repeated, and its answer may come before its body has ended: the
connection is closed then, whatever the worker would still like to read.

Deadlines are plain attributes that one sweep compares with the clock: no timer per request.
"""

from __future__ import annotations

import asyncio
import ssl as ssl_module
from collections import deque
from collections.abc import Callable
from typing import Protocol

import httptools
from msgspec import Struct

from kvrelay.core.model.units import Fault
from kvrelay.edge.http.heads import BODYLESS_STATUS, Header
from kvrelay.edge.http.tls import tls_complaint
from kvrelay.edge.http.transport import prepared

SWEEP_INTERVAL_S = 0.1
STALE_WITHIN_S = 0.5
NEVER = float("inf")


class Origin(Struct, frozen=True):
    """Where connections go; calls to equal origins share them."""

    host: str
    port: int
    tls: ssl_module.SSLContext | None = None  # None: plain HTTP


class CallTimeouts(Struct, frozen=True):
    connect_s: float = 2.0
    first_byte_s: float = 300.0  # from the request being written to the first byte of the answer's body
    idle_s: float = 60.0  # longest silence inside the body


class PoolLimits(Struct, frozen=True):
    idle_per_origin: int = 256
    idle_s: float = 4.0  # below the 5 s after which common Python servers close a kept connection
    head_bytes: int = 256 * 1024
    write_buffer_bytes: int = 256 * 1024


class Listener(Protocol):
    """Who wants the answer. Errors name the side at fault in the router's own words."""

    def on_accepted(self) -> None: ...
    def on_interim(self, status: int, headers: list[Header]) -> None: ...
    def on_head(self, status: int, headers: list[Header]) -> None: ...
    def on_data(self, data: bytes) -> None: ...
    def on_end(self) -> None: ...
    def on_error(self, fault: Fault, detail: str) -> None: ...


class Call:
    """One request on its way. Owned by the caller until `on_end`, `on_error` or `abort()`."""

    __slots__ = (
        "_connecting",
        "_connection",
        "_pool",
        "body_open",
        "bodyless",
        "deadline_s",
        "in_body",
        "listener",
        "on_writable",
        "origin",
        "paused",
        "payload",
        "received",
        "retried",
        "timeouts",
        "trailers",
        "writable",
        "written_at",
    )

    def __init__(
        self,
        pool: UpstreamPool,
        origin: Origin,
        payload: bytes,
        listener: Listener,
        timeouts: CallTimeouts,
        head: bool,
        on_writable: Callable[[bool], None] | None,
    ) -> None:
        self._pool = pool
        self._connection: UpstreamConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self.origin = origin
        self.payload = payload
        self.listener = listener
        self.timeouts = timeouts
        self.bodyless = head
        self.deadline_s = NEVER
        self.written_at = NEVER
        self.received = False
        self.in_body = False
        self.retried = False
        self.paused = False
        self.trailers: list[Header] = []
        """Of the answer; complete when `on_end` is called."""
        self.on_writable = on_writable
        self.body_open = on_writable is not None
        self.writable = True

    def abort(self) -> None:
        """Close the connection at once: the worker sees the client leave. May be called at any time, repeatedly."""
        self._pool.forget(self)
        self.on_writable = None  # it holds the caller, who holds this
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abandon()

    def set_flow(self, wanted: bool) -> None:
        """False: stop reading the answer (the client is slow). True: go on."""
        self.paused = not wanted
        if self._connection is not None:
            self._connection.set_reading(wanted)
            self.deadline_s = self._pool.now() + self.timeouts.idle_s if wanted else NEVER  # the silence is ours
            if self.body_open:
                self._watch_body()

    def hasten(self, silence_s: float) -> None:
        """From now on no silence of the worker is borne for longer than this."""
        times = self.timeouts
        self.timeouts = CallTimeouts(times.connect_s, min(times.first_byte_s, silence_s), min(times.idle_s, silence_s))
        if self.deadline_s != NEVER:  # else the silence is not its own
            self.deadline_s = min(self.deadline_s, self._pool.now() + silence_s)

    def send(self, data: bytes) -> None:
        """More of the body, framed as the head says. Not before `on_accepted`, and not after `on_writable(False)`."""
        assert self.body_open, "the body has ended"
        if self._connection is not None:
            self._connection.write(data)

    def end_body(self, rest: bytes = b"") -> None:
        """The body is complete with this; from now on the answer is due."""
        self.send(rest)
        self.body_open = False
        self.on_writable = None
        self.written_at = self._pool.now()
        if not self.paused:
            timeouts = self.timeouts
            self.deadline_s = self.written_at + (timeouts.idle_s if self.in_body else timeouts.first_byte_s)

    def note_writable(self, writable: bool) -> None:
        """Called by the connection: its buffer is full, or has emptied again."""
        self.writable = writable
        if self.body_open:
            self._watch_body()
            if self.on_writable is not None:
                self.on_writable(writable)

    def _watch_body(self) -> None:
        """While the body goes out the worker owes us nothing but to read it; a slow client is not its fault."""
        self.deadline_s = NEVER if self.writable else self._pool.now() + self.timeouts.idle_s

    def attach(self, connection: UpstreamConnection) -> None:
        self._connection = connection

    def detach(self) -> None:
        self._connection = None

    def connect_by(self, task: asyncio.Task[None] | None) -> None:
        self._connecting = task


class UpstreamPool:
    """All upstream connections of one event loop."""

    def __init__(self, limits: PoolLimits | None = None) -> None:
        self.limits = limits or PoolLimits()
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time
        self._idle: dict[Origin, deque[UpstreamConnection]] = {}
        self._calls: dict[Call, None] = {}
        self._sweeper = self._loop.call_later(SWEEP_INTERVAL_S, self._sweep)

    @property
    def open_calls(self) -> int:
        return len(self._calls)

    def request(
        self,
        origin: Origin,
        payload: bytes,
        listener: Listener,
        timeouts: CallTimeouts,
        *,
        head: bool = False,
        on_writable: Callable[[bool], None] | None = None,
    ) -> Call:
        """Send `payload`, a whole HTTP/1.1 request, to `origin`. `head`: the answer has no body.

        With `on_writable` it is only the beginning of one: the rest follows by `Call.send` and `Call.end_body`, and
        `on_writable` tells when to stop (False) and to go on (True).
        """
        call = Call(self, origin, payload, listener, timeouts, head, on_writable)
        self._calls[call] = None
        connection = self._take_idle(origin) if on_writable is None else None
        if connection is not None:
            connection.begin(call, reused=True)
        else:
            self._connect(call)
        return call

    def close(self) -> None:
        """Abort every call without a callback and close every connection."""
        self._sweeper.cancel()
        for call in tuple(self._calls):
            call.abort()
        for idle in self._idle.values():
            for connection in idle:
                connection.abandon()
        self._idle.clear()

    def drop_idle(self, origin: Origin) -> None:
        """Forget kept connections, for a worker that was replaced or removed."""
        for connection in self._idle.pop(origin, ()):
            connection.abandon()

    # --- what calls and connections use ------------------------------------------------------------------------------

    def forget(self, call: Call) -> None:
        self._calls.pop(call, None)

    def keep(self, connection: UpstreamConnection) -> None:
        idle = self._idle.setdefault(connection.origin, deque())
        idle.append(connection)
        if len(idle) > self.limits.idle_per_origin:
            idle.popleft().abandon()

    def lost_idle(self, connection: UpstreamConnection) -> None:
        idle = self._idle.get(connection.origin)
        if idle is not None:
            try:
                idle.remove(connection)
            except ValueError:
                pass

    def fail(self, call: Call, fault: Fault, detail: str) -> None:
        """End a call badly; its connection is of no use any more."""
        if call not in self._calls:
            return
        call.abort()
        call.listener.on_error(fault, detail)

    def fail_reused(self, call: Call, detail: str) -> None:
        """A kept connection broke: repeat the call if that is safe (see the module text)."""
        if call not in self._calls:
            return
        if call.received or call.retried or self.now() - call.written_at > STALE_WITHIN_S:
            self.fail(call, Fault.RESET, detail)
            return
        call.retried = True
        call.detach()
        self.drop_idle(call.origin)
        self._connect(call)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _take_idle(self, origin: Origin) -> UpstreamConnection | None:
        """The most recently used one: old ones run out and are closed by the sweep."""
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            if connection.usable:
                return connection
        return None

    def _connect(self, call: Call) -> None:
        call.connect_by(self._loop.create_task(self._open(call)))

    async def _open(self, call: Call) -> None:
        origin = call.origin
        try:
            async with asyncio.timeout(call.timeouts.connect_s):
                _, connection = await self._loop.create_connection(
                    lambda: UpstreamConnection(self, origin),
                    origin.host,
                    origin.port,
                    ssl=origin.tls,
                )
        except TimeoutError:
            call.connect_by(None)
            self.fail(call, Fault.CONNECT_TIMEOUT, f"no connection within {call.timeouts.connect_s:g} s")
        except ssl_module.SSLError as error:
            call.connect_by(None)
            self.fail(call, Fault.TLS, tls_complaint(error))
        except OSError as error:
            call.connect_by(None)
            self.fail(call, Fault.CONNECT, error.strerror or type(error).__name__)
        else:
            call.connect_by(None)
            connection.begin(call, reused=False)

    def _sweep(self) -> None:
        now_s = self.now()
        for call in tuple(self._calls):
            if now_s > call.deadline_s:
                self.fail(call, *_overdue(call))
        for idle in self._idle.values():
            while idle and now_s - idle[0].idle_since > self.limits.idle_s:
                idle.popleft().abandon()
        self._sweeper = self._loop.call_later(SWEEP_INTERVAL_S, self._sweep)


def _overdue(call: Call) -> tuple[Fault, str]:
    if call.body_open and not call.writable:
        return Fault.IDLE_TIMEOUT, "the worker took no more of the request body"
    if call.in_body:
        return Fault.IDLE_TIMEOUT, "the worker fell silent"
    return Fault.FIRST_BYTE_TIMEOUT, "no byte of an answer came"


class UpstreamConnection(asyncio.Protocol):
    """One connection to a worker; carries one call at a time."""

    def __init__(self, pool: UpstreamPool, origin: Origin) -> None:
        self.origin = origin
        self.idle_since = 0.0
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser  # from `connection_made` to `connection_lost`: it holds us
        self._call: Call | None = None
        self._reused = False
        # the answer that is being read
        self._status = 0
        self._headers: list[Header] = []
        self._head_bytes = 0  # of a head without end; then of trailers without end
        self._head_read = False
        self._head_told = False
        self._pieces: list[bytes] = []
        self._complete = False
        self._keep_alive = False
        self._surplus = False
        self._ends_with_connection = False

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def begin(self, call: Call, *, reused: bool) -> None:
        """Write the request. The listener hears `on_accepted` before anything else."""
        transport = self._transport
        if transport is None:  # lost between connecting and here
            self._pool.fail(call, Fault.RESET, "closed at once")
            return
        self._call = call
        self._reused = reused
        self._status = self._head_bytes = 0
        self._headers = []
        self._head_read = self._head_told = self._complete = False
        self._keep_alive = self._ends_with_connection = False
        call.attach(self)
        now_s = self._pool.now()
        call.written_at = now_s
        call.deadline_s = NEVER if call.body_open else now_s + call.timeouts.first_byte_s
        transport.write(call.payload)
        if call.paused:
            self.set_reading(False)
            call.deadline_s = NEVER
        call.listener.on_accepted()

    def abandon(self) -> None:
        """Close without a word to anybody."""
        self._call = None
        if self._transport is not None:
            self._transport.abort()

    def write(self, data: bytes) -> None:
        if self._transport is not None and data:
            self._transport.write(data)

    def set_reading(self, wanted: bool) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if wanted:
            transport.resume_reading()
        else:
            transport.pause_reading()

    # --- transport callbacks -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = prepared(transport, write_buffer_bytes=self._pool.limits.write_buffer_bytes)
        self._parser = httptools.HttpResponseParser(self)

    def pause_writing(self) -> None:
        if self._call is not None:
            self._call.note_writable(False)

    def resume_writing(self) -> None:
        if self._call is not None:
            self._call.note_writable(True)

    def data_received(self, data: bytes) -> None:
        call = self._call
        if call is None:  # an answer to nothing: this connection is out of step
            self.abandon()
            return
        call.received = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._tell(call)
            if self._call is call and not self._complete:
                self._pool.fail(call, Fault.GARBAGE, f"not HTTP/1.1: {error}")
            return
        if not self._pieces and not self._complete and self._is_endless(len(data)):
            self._pool.fail(call, Fault.GARBAGE, f"a header or trailer of more than {self._head_bytes} bytes")
            return
        self._tell(call)

    def _is_endless(self, read_bytes: int) -> bool:
        """This read brought neither body nor end: so much may the parser gather, and no more."""
        self._head_bytes += read_bytes
        return self._head_bytes > self._pool.limits.head_bytes

    def eof_received(self) -> bool:
        call = self._call
        if call is not None and self._head_read and self._ends_with_connection:
            self._complete = True
            self._tell(call)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        del self._parser  # it holds our callbacks, and so us: a cycle that would wait for the collector
        call, self._call = self._call, None
        if call is None:
            self._pool.lost_idle(self)
            return
        if self._head_read:
            detail = "the connection ended inside the answer"
        else:
            detail = "the connection ended before an answer"
        if self._reused:
            self._pool.fail_reused(call, detail)
        else:
            self._pool.fail(call, Fault.RESET, detail)

    # --- parser callbacks --------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._complete:  # a second answer to one request: nothing that follows is of use
            self._surplus = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head_read:
            self._headers.append((name, value))
        elif self._call is not None and not self._surplus:
            self._call.trailers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._surplus:
            return
        status = self._parser.get_status_code()
        if status < 200:
            self._pass_interim(status)
            return
        self._status = status
        self._head_read = True
        self._ends_with_connection = status not in BODYLESS_STATUS and not self._length_known()
        call = self._call
        if call is not None and call.bodyless:
            self._complete = True

    def _pass_interim(self, status: int) -> None:
        """Not 100, which answers an expectation: we told the client ourselves. Nor 101, which nobody asked for."""
        headers, self._headers = self._headers, []
        if status > 101 and self._call is not None:
            self._call.listener.on_interim(status, headers)

    def _length_known(self) -> bool:
        for name, _ in self._headers:
            if len(name) in (14, 17) and name.lower() in (b"content-length", b"transfer-encoding"):
                return True
        return False

    def on_body(self, data: bytes) -> None:
        if not self._complete:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        if self._head_read and not self._surplus:
            self._complete = True
            self._keep_alive = self._parser.should_keep_alive()  # known only inside this callback

    # --- telling -----------------------------------------------------------------------------------------------------

    def _tell(self, call: Call) -> None:
        """Hand over what this read brought. The listener may abort the call in any of its callbacks."""
        if not self._head_read:
            return
        if not self._head_told:
            self._head_told = True
            call.listener.on_head(self._status, self._headers)
        if self._pieces:
            call.in_body = True
            self._head_bytes = 0
            if not call.body_open:
                call.deadline_s = self._pool.now() + call.timeouts.idle_s
            pieces, self._pieces = self._pieces, []
            if self._call is call:
                call.listener.on_data(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        if self._complete and self._call is call:
            self._release(call)
            call.listener.on_end()

    def _release(self, call: Call) -> None:
        """The answer is complete: the connection is kept if both sides are surely at the end of a message."""
        self._call = None
        call.detach()
        self._pool.forget(call)
        call.on_writable = None
        transport = self._transport
        if transport is None:
            return
        out_of_step = call.body_open or call.bodyless or self._ends_with_connection or self._surplus
        if self._keep_alive and not out_of_step and transport.get_write_buffer_size() == 0:
            if call.paused:
                transport.resume_reading()
            self.idle_since = self._pool.now()
            self._pool.keep(self)
        else:
            transport.abort()
