"""Our HTTP/1.1 server: a protocol per connection, a callback per request, no task and no future per request.

Order of answers is the order of requests: while one exchange is open on a connection, later (pipelined) requests wait
parsed in `_waiting`. Reading goes on meanwhile, because it is the only way to notice that the client left.

Small bodies are read whole. Of a body that may be large the handler gets an `Upload`, in its turn, and decides how fast
it is read (`HttpServer.held_at_most` says where "large" begins). That is decided only when a body did not come with its
head in one read, so it costs the common request nothing.

Whatever could make two neighbours disagree about where a request ends is refused and the connection closed: the parser
does most of it (both lengths, two lengths, folded headers, bare line feeds, bad chunks), `_refusal_of_head` the rest.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl as ssl_module
import struct
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import httptools
import msgspec

from kvrelay.edge.http.exchange import Exchange, Spoilt
from kvrelay.edge.http.heads import Header, status_line
from kvrelay.edge.http.limits import HttpLimits
from kvrelay.edge.http.transport import prepared
from kvrelay.edge.http.upload import Upload

__all__ = ["Exchange", "Handler", "HeldAtMost", "HttpLimits", "HttpServer", "start_server"]

Handler = Callable[[Exchange], None]
HeldAtMost = Callable[[str, Sequence[Header]], int | None]
"""Of a path and a head: how many bytes of the body to read before the handler is called. A longer one becomes an
`Upload`; None: it never does."""
log = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 0.5


class HttpServer:
    """One listener with its connections. `draining` makes every answer the last one of its connection."""

    def __init__(self, handler: Handler, limits: HttpLimits, held_at_most: HeldAtMost | None = None) -> None:
        self.handler = handler
        self.held_at_most = held_at_most
        self.limits = limits
        self.draining = False
        self.connections: dict[ServerConnection, None] = {}
        self._loop = asyncio.get_running_loop()
        self._listener: asyncio.Server | None = None
        self._port = 0
        self._sweeper: asyncio.TimerHandle | None = None
        self._idle: asyncio.Event | None = None
        self._last_left: asyncio.Event | None = None

    async def listen(self, *, host: str, port: int, ssl: ssl_module.SSLContext | None, reuse_port: bool) -> None:
        self._listener = await self._loop.create_server(
            lambda: ServerConnection(self),
            host,
            port,
            ssl=ssl,
            reuse_address=True,
            reuse_port=reuse_port or None,
            backlog=2048,
        )
        self._port = int(self._listener.sockets[0].getsockname()[1])
        self._sweep()

    @property
    def port(self) -> int:
        """The bound port, also when port 0 was asked for, and also after it was left."""
        return self._port

    def change_limits(self, limits: HttpLimits) -> None:
        """For all connections, from their next request on."""
        self.limits = limits
        for connection in self.connections:
            connection.limits = limits

    @property
    def open_exchanges(self) -> int:
        """Requests whose answer is not complete, waiting ones included."""
        return sum(connection.open_exchanges for connection in self.connections)

    async def drain(self, grace_s: float) -> bool:
        """Let open exchanges end for at most `grace_s`; the listener stays open. True: all of them ended."""
        self.draining = True
        for connection in tuple(self.connections):
            connection.close_if_idle()
        self._idle = asyncio.Event()
        self.note_exchange_end()
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def leave_port(self) -> None:
        """No new connections; those that are there go on. For one of several who share the port."""
        if self._listener is not None:
            self._listener.close()

    async def let_last_answers_leave(self) -> None:
        """Until the connections that are closing have closed, at most as long as one of them may linger."""
        self._last_left = asyncio.Event()
        self.note_connection_end()
        with suppress(TimeoutError):
            async with asyncio.timeout(self.limits.linger_s):
                await self._last_left.wait()

    def note_connection_end(self) -> None:
        if self._last_left is not None and not any(connection.lingering for connection in self.connections):
            self._last_left.set()

    async def close(self) -> None:
        """Stop listening and cut every connection; handlers with an open exchange get `on_gone`."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._listener is None:
            return
        self._listener.close()
        for connection in tuple(self.connections):
            connection.cut()
        await self._listener.wait_closed()

    def note_exchange_end(self) -> None:
        if self._idle is not None and self.open_exchanges == 0:
            self._idle.set()

    def _sweep(self) -> None:
        """One coarse timer for all connections: a timer per request would cost more than the request."""
        now_s = self._loop.time()
        for connection in tuple(self.connections):
            connection.check_deadlines(now_s)
        self._sweeper = self._loop.call_later(SWEEP_INTERVAL_S, self._sweep)


async def start_server(
    handler: Handler,
    *,
    host: str,
    port: int,
    limits: HttpLimits | None = None,
    ssl: ssl_module.SSLContext | None = None,
    reuse_port: bool = False,
    held_at_most: HeldAtMost | None = None,
) -> HttpServer:
    """Listen and call `handler` once per request. Port 0 takes a free one (`HttpServer.port`).

    Without `held_at_most` every body is whole when its handler is called.
    """
    server = HttpServer(handler, limits or HttpLimits(), held_at_most)
    await server.listen(host=host, port=port, ssl=ssl, reuse_port=reuse_port)
    return server


class ServerConnection(asyncio.Protocol):
    """One client connection."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self.limits = server.limits
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._active: Exchange | None = None
        self._waiting: deque[Exchange] = deque()
        self._advancing = False
        self._pipeline_full = False
        self._body_unwanted = False  # reading rests for either of the two
        self._write_paused = False
        # the request that is being read
        self._in_head = False
        self._in_body = False
        self._began_in_this_read = False
        self._raw_bytes = 0
        self._raw_bytes_at_growth = 0  # when the body last grew
        self._body_bytes = 0
        self._body_bytes_at_check = 0
        self._url = b""
        self._version = ""
        self._headers: list[Header] = []
        self._names: list[bytes] = []  # of the headers, in lower case
        self._this_read_bytes = 0
        self._read_bytes = 0  # of all reads that the request has a part in: its head cannot be larger
        self._body: list[bytes] = []
        self._trailers: list[Header] | None = None
        self._upload: Upload | None = None  # takes the body, if it is not read whole
        self._uploading: Exchange | None = None  # whose upload that is
        self._resuming_body = False
        self._continue_due = False
        # the end of the connection
        self._last_request_read = False
        self._refusal: bytes | None = None
        self._lingering_since: float | None = None
        self._progress_at = self._loop.time()
        self._head_began_at = 0.0

    # --- transport callbacks -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = prepared(transport, write_buffer_bytes=self.limits.write_buffer_bytes)
        self._server.connections[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        del self._parser  # it holds our callbacks, and so us: a cycle that would wait for the collector
        self._server.connections.pop(self, None)
        self._server.note_connection_end()
        self._client_left()

    def eof_received(self) -> bool:
        """A client that closes its sending side before it has its answer has given up: that is how aborts look."""
        self._client_left()
        return False

    def pause_writing(self) -> None:
        self._write_paused = True
        if self._active is not None and self._active.on_flow is not None:
            self._active.on_flow(False)

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._active is not None and self._active.on_flow is not None:
            self._active.on_flow(True)

    def data_received(self, data: bytes) -> None:
        self._progress_at = self._loop.time()
        if self._last_request_read:
            return
        self._began_in_this_read = False
        self._this_read_bytes = len(data)
        self._read_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
            return  # what follows was done for the rest
        except httptools.HttpParserError as error:
            if not self._last_request_read:
                self._refuse(400, f"malformed request: {error}")
        if self._in_head or self._in_body:
            self._check_raw_bytes(0 if self._began_in_this_read else len(data))
            if self._in_body:
                self._body_goes_on()

    # --- parser callbacks --------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._resuming_body:
            return
        self._in_head = True
        self._began_in_this_read = True
        self._raw_bytes = self._raw_bytes_at_growth = self._body_bytes = self._body_bytes_at_check = 0
        self._trailers = None
        self._read_bytes = self._this_read_bytes
        self._url = b""
        self._headers = []
        self._names = []
        self._body = []
        self._head_began_at = self._progress_at

    def on_url(self, url: bytes) -> None:
        if not self._resuming_body:
            self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            self._headers.append((name, value))
            self._names.append(name.lower())
        elif self._trailers is None:
            self._trailers = [(name, value)]
        else:
            self._trailers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._resuming_body:
            self._trailers = None  # it was the head, for the second time
            return
        self._in_head = False
        self._in_body = True
        self._continue_due = False
        refusal = self._refusal_of_head()
        if refusal is not None:
            self._refuse(*refusal)

    def on_body(self, data: bytes) -> None:
        self._continue_due = False
        self._body_bytes += len(data)
        if self._body_bytes > self.limits.body_bytes and not self._may_be_uploaded(self._body_bytes):
            self._refuse(413, f"the body has more than {self._most_body_bytes()} bytes")
        elif not self._last_request_read:
            self._body.append(data)

    def on_message_complete(self) -> None:
        self._in_body = False
        if self._last_request_read:
            return
        if self._parser.should_upgrade() and self._upgrade_hides_body():
            return
        self._resuming_body = False
        if self._upload is not None:
            self._end_upload(self._upload)
            return
        keep_alive = self._parser.should_keep_alive() and not self._server.draining
        self._last_request_read = not keep_alive
        exchange = Exchange(
            self,
            method=self._parser.get_method().decode("latin-1"),
            target=_origin_form(self._url),
            version=self._version,
            headers=self._headers,
            body=self._body[0] if len(self._body) == 1 else b"".join(self._body),
            keep_alive=keep_alive,
            trailers=self._trailers or (),
        )
        self._body = []
        if self._active is None:
            self._begin(exchange)
        else:
            self._queue(exchange)

    # --- what the exchange calls -------------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def exchange_done(self, exchange: Exchange) -> None:
        self._active = None
        if not exchange.keep_alive or self._server.draining:
            self._waiting.clear()
            self._linger(unread=exchange.upload is not None and not exchange.upload.complete)
        elif self._waiting or self._refusal is not None or self._continue_due:
            self._advance()
        self._server.note_exchange_end()

    def break_off(self, *, framed: bool) -> None:
        """A framed body is visibly incomplete after a normal close; one that ends with the connection needs a reset."""
        self._active = self._upload = self._uploading = None
        self._waiting.clear()
        self._last_request_read = True
        transport = self._transport
        if transport is None:
            return
        if framed:
            self._lingering_since = self._loop.time()
            transport.close()
        else:
            raw = transport.get_extra_info("socket")
            if raw is not None:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()
        self._server.note_exchange_end()

    # --- what the server calls ---------------------------------------------------------------------------------------

    @property
    def open_exchanges(self) -> int:
        return (self._active is not None) + len(self._waiting)

    @property
    def lingering(self) -> bool:
        """Its last answer was written and may be on its way."""
        return self._lingering_since is not None

    def close_if_idle(self) -> None:
        if self._active is None and not self._in_head and not self._in_body:
            self.cut()

    def cut(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def check_deadlines(self, now_s: float) -> None:
        limits = self.limits
        if self._lingering_since is not None:
            quiet_since = max(self._lingering_since, self._progress_at)
            if now_s - quiet_since > limits.linger_s or now_s - self._lingering_since > limits.discard_s:
                self.cut()
        elif self._in_head:
            if now_s - self._head_began_at > limits.head_timeout_s:
                self._refuse(408, f"the request header took more than {limits.head_timeout_s:g} s")
        elif self._in_body:
            if now_s - self._progress_at > limits.body_timeout_s and not (self._pipeline_full or self._body_unwanted):
                self._refuse(408, f"no byte of the request body came for {limits.body_timeout_s:g} s")
        elif self._active is None and now_s - self._progress_at > limits.idle_timeout_s:
            self.cut()

    # --- reading -----------------------------------------------------------------------------------------------------

    def _refusal_of_head(self) -> tuple[int, str] | None:
        """What the parser lets through and we do not. On every request's path: set and list operations, no loop."""
        names = self._names
        self._version = version = self._parser.get_http_version()
        if self._read_bytes > self.limits.header_bytes and self._head_bytes() > self.limits.header_bytes:
            return 431, f"the request header has more than {self.limits.header_bytes} bytes"
        if version not in ("1.0", "1.1"):
            return 505, "the versions understood are HTTP/1.0 and HTTP/1.1"
        if names.count(b"host") != 1 and (version == "1.1" or b"host" in names):
            return 400, "a request needs exactly one Host header"
        if b"content-length" in names:
            declared_bytes = int(self._value(b"content-length"))
            if declared_bytes > self.limits.body_bytes and not self._may_be_uploaded(declared_bytes):
                return 413, f"the body is declared as {declared_bytes} bytes; the limit is {self._most_body_bytes()}"
        if b"transfer-encoding" in names and (version != "1.1" or self._value(b"transfer-encoding") != b"chunked"):
            return 501, "the only transfer coding understood is `chunked`, in HTTP/1.1"
        if b"expect" in names:
            if self._value(b"expect") != b"100-continue":
                return 417, "the only expectation understood is `100-continue`"
            self._continue_due = version == "1.1"
        if self._parser.get_method() == b"CONNECT":
            return 501, "CONNECT is not offered"
        return None

    def _value(self, lowercase_name: bytes) -> bytes:
        return self._headers[self._names.index(lowercase_name)][1].strip().lower()

    def _declared_bytes(self) -> int | None:
        return int(self._value(b"content-length")) if b"content-length" in self._names else None

    def _head_bytes(self) -> int:
        return len(self._url) + sum(len(name) + len(value) + 4 for name, value in self._headers)

    def _check_raw_bytes(self, read_bytes: int) -> None:
        """Bounds what the parser itself may gather: a header without end, or chunk framing and trailers without end."""
        self._raw_bytes += read_bytes
        if self._in_head:
            if self._raw_bytes > self.limits.header_bytes:
                self._refuse(431, f"the request header has more than {self.limits.header_bytes} bytes")
            return
        if self._body_bytes > self._body_bytes_at_check:
            self._body_bytes_at_check = self._body_bytes
            self._raw_bytes_at_growth = self._raw_bytes
        elif self._raw_bytes - self._raw_bytes_at_growth > self.limits.header_bytes:
            self._refuse(413, f"chunk framing or trailers have more than {self.limits.header_bytes} bytes")
        if self._raw_bytes > self.limits.header_bytes + 2 * self._most_body_bytes():
            self._refuse(413, "chunk framing and trailers are larger than the body they carry")

    def _upgrade_hides_body(self) -> bool:
        """The parser ends a message that asks for an upgrade at its header, body or not; see `_ignore_upgrade`."""
        if self._resuming_body:
            return False
        lengths = (b"content-length", b"transfer-encoding")
        self._resuming_body = any(name.lower() in lengths for name, _ in self._headers)
        return self._resuming_body

    def _ignore_upgrade(self, rest: bytes) -> None:
        """We stay at HTTP/1.1, which is a legal answer to any upgrade (some clients ask for h2c in every request).

        The parser cannot go on by itself, so a new one gets the rest. If a body is due, the new parser first gets the
        same header again without its `Upgrade`, and everything but the body is taken from the first reading.
        """
        if self._last_request_read:
            return
        method = self._parser.get_method()
        self._parser = httptools.HttpRequestParser(self)
        if self._resuming_body:
            self._in_body = True
            again = [b"%b: %b\r\n" % header for header in self._headers if header[0].lower() != b"upgrade"]
            rest = method + b" / HTTP/1.1\r\n" + b"".join(again) + b"\r\n" + rest
        if rest:
            self.data_received(rest)

    def _refuse(self, status: int, message: str) -> None:
        """Answer with an error, after the answers that are still due, and read nothing more."""
        if self._last_request_read:
            return
        self._last_request_read = True
        self._in_head = self._in_body = False
        self._body = []
        if self._uploading is not None and not self._spoil(self._uploading, Spoilt(status, message)):
            return
        error = {"error": {"message": message, "type": "invalid_request_error", "code": status}}
        body = msgspec.json.encode(error)
        self._refusal = (
            status_line(status)
            + b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            + body
        )
        self._advance()

    # --- answering in order ------------------------------------------------------------------------------------------

    def _queue(self, exchange: Exchange) -> None:
        self._waiting.append(exchange)
        if len(self._waiting) >= self.limits.pipelined_requests:
            self._pipeline_full = True
            self._set_reading()

    def _advance(self) -> None:
        """Begin what waits, one after the other; a loop, because a handler may answer at once."""
        if self._advancing:
            return
        self._advancing = True
        while self._active is None and self._waiting:
            self._begin(self._waiting.popleft())
        self._advancing = False
        if self._pipeline_full and len(self._waiting) < self.limits.pipelined_requests:
            self._pipeline_full = False
            self._set_reading()
        if self._active is not None:
            return
        if self._refusal is not None:
            self.send(self._refusal)
            self._refusal = None
            self._linger()
        elif self._continue_due and self._in_body and self._upload is None:
            self._send_continue()

    def _begin(self, exchange: Exchange) -> None:
        self._active = exchange
        paused_by_the_last = self._write_paused
        try:
            self._server.handler(exchange)
        except Exception:  # a mistake of ours in one request must not take the others with it
            log.exception("the handler of %s %s failed", exchange.method, exchange.path)
            if exchange.started:
                exchange.abort()
            else:
                exchange.keep_alive = False
                exchange.respond(500, (), b"")
        if paused_by_the_last and exchange.on_flow is not None:
            exchange.on_flow(False)

    def _send_continue(self) -> None:
        self._continue_due = False
        self.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _client_left(self) -> None:
        self._waiting.clear()
        self._upload = self._uploading = None
        exchange = self._active
        if exchange is not None:
            self._active = None
            exchange.client_left()
            self._server.note_exchange_end()

    def _linger(self, *, unread: bool = False) -> None:
        """Close so that the last answer is read: a close with unread input would reset the connection under it.

        `unread`: part of a body is still to come. It is thrown away for as long as the client goes on sending, within
        bounds; many clients look for an answer only when they have sent everything.
        """
        self._last_request_read = True
        self._upload = self._uploading = None
        transport = self._transport
        if transport is None or self._lingering_since is not None:
            return
        self._lingering_since = self._loop.time()
        self._body_unwanted = self._pipeline_full = False
        self._set_reading()
        if transport.can_write_eof():
            with suppress(OSError):  # the client has reset the connection, and we shall hear of it
                transport.write_eof()
        elif not unread:
            transport.close()  # else the client closes, or the sweep: TLS cannot end one direction only

    # --- a body that is not read whole -------------------------------------------------------------------------------

    def _body_goes_on(self) -> None:
        """More of the body is to come than this read brought: never so for a small request."""
        if self._upload is not None:
            self._pass_pieces(self._upload)
        elif self._is_large():
            self._begin_upload()
        elif self._continue_due and self._active is None:
            self._send_continue()

    def _held_at_most(self) -> int | None:
        held_at_most = self._server.held_at_most
        return None if held_at_most is None else held_at_most(_origin_form(self._url), self._headers)

    def _may_be_uploaded(self, body_bytes: int) -> bool:
        if body_bytes > self.limits.streamed_body_bytes:
            return False
        return self._upload is not None or self._held_at_most() is not None

    def _is_large(self) -> bool:
        held_at_most = self._held_at_most()
        return held_at_most is not None and max(self._body_bytes, self._declared_bytes() or 0) > held_at_most

    def _most_body_bytes(self) -> int:
        if self._upload is None and self._held_at_most() is None:
            return self.limits.body_bytes
        return max(self.limits.body_bytes, self.limits.streamed_body_bytes)

    def _begin_upload(self) -> None:
        self._upload = upload = Upload(self, self._declared_bytes())
        self._uploading = exchange = Exchange(
            self,
            method=self._parser.get_method().decode("latin-1"),
            target=_origin_form(self._url),
            version=self._parser.get_http_version(),
            headers=self._headers,
            body=b"",
            keep_alive=self._parser.should_keep_alive() and not self._server.draining,
            upload=upload,
        )
        self.set_body_flow(False)
        self._pass_pieces(upload)
        if self._active is None:
            self._begin(exchange)
        else:
            self._queue(exchange)

    def set_body_flow(self, wanted: bool) -> None:
        """For the upload that is being read; it asks for nothing before its turn has come."""
        self._body_unwanted = not wanted
        self._progress_at = self._loop.time()  # the silence until now was ours
        if wanted and self._continue_due:
            self._send_continue()
        self._set_reading()

    def _pass_pieces(self, upload: Upload) -> None:
        if self._body:
            pieces, self._body = self._body, []
            upload.take(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def _end_upload(self, upload: Upload) -> None:
        exchange, self._uploading = self._uploading, None
        assert exchange is not None
        self._last_request_read = not exchange.keep_alive
        self._pass_pieces(upload)
        self._upload = None
        self._body_unwanted = False
        self._set_reading()
        upload.end(self._trailers or ())

    def _spoil(self, exchange: Exchange, spoilt: Spoilt) -> bool:
        """Its body cannot be taken to its end. False: it had an answer already, which is broken off."""
        self._upload = self._uploading = None
        self._body_unwanted = False
        self._set_reading()
        if exchange is not self._active:
            self._waiting.remove(exchange)
            return True
        answered = exchange.started
        if not answered:
            self._active = None
        exchange.spoil(spoilt)
        if not answered:
            self._server.note_exchange_end()
        return not answered

    def _set_reading(self) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._pipeline_full or self._body_unwanted:
            transport.pause_reading()
        else:
            transport.resume_reading()


def _origin_form(url: bytes) -> str:
    """`/path?query`, also when the client sent the absolute form that proxies get."""
    target = url.decode("latin-1")
    if target.startswith("/") or "://" not in target:
        return target
    _, _, after_scheme = target.partition("://")
    _, slash, path = after_scheme.partition("/")
    return slash + path if slash else "/"
