"""One request and its response, as a handler sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from kvrelay.edge.http.heads import BODYLESS_STATUS, Header, append_headers, find, last_chunk, status_line
from kvrelay.edge.http.upload import Upload


class Stage(Enum):
    """How far the response is."""

    WAITING = "waiting"
    STREAMING = "streaming"
    DONE = "done"


class Framing(Enum):
    """How the end of a streamed body is told to the client."""

    CHUNKED = "chunked"
    LENGTH = "length"
    CLOSE = "close"  # HTTP/1.0: the end of the connection is the end of the body
    NONE = "none"  # HEAD, 204, 304: a head and no body


class Spoilt(NamedTuple):
    """What was wrong with the rest of a request that had been begun, as its client was told."""

    http_status: int
    reason: str


class Connection(Protocol):
    """What an exchange needs of the connection it came on."""

    def send(self, data: bytes) -> None: ...
    def exchange_done(self, exchange: Exchange) -> None: ...
    def break_off(self, *, framed: bool) -> None: ...


class Exchange:
    """The request is complete before the handler sees it, but for one with an `upload`, whose body is still to come.
    The handler answers with `respond`, or with `start`, any number of `write`, and `finish` or `abort`; each may be
    called later, from any callback of the loop.

    After the client has left (`on_gone` was called) every answering method does nothing. Bodies are relayed as given.
    An answer that begins before its request's body has ended is the last one of its connection: what is left of the
    body is thrown away, as nobody could say where the next request begins.
    """

    __slots__ = (
        "_bytes_due",
        "_connection",
        "_framing",
        "_stage",
        "body",
        "headers",
        "keep_alive",
        "method",
        "on_flow",
        "on_gone",
        "path",
        "query",
        "spoilt",
        "target",
        "trailers",
        "upload",
        "version",
    )

    def __init__(
        self,
        connection: Connection,
        *,
        method: str,
        target: str,
        version: str,
        headers: list[Header],
        body: bytes,
        keep_alive: bool,
        trailers: Sequence[Header] = (),
        upload: Upload | None = None,
    ) -> None:
        self._connection: Connection | None = connection
        self._stage = Stage.WAITING
        self._framing = Framing.NONE
        self._bytes_due = 0
        self.method = method
        self.target = target
        self.path, _, self.query = target.partition("?")
        self.version = version
        self.headers = headers
        self.body = body
        self.keep_alive = keep_alive
        self.trailers = trailers
        """Of a whole body; those of an upload come with its end."""
        self.upload = upload
        """None: `body` is all of it. Else the body comes through this."""
        self.spoilt: Spoilt | None = None
        """Why the rest of an upload could not be taken; the client has its answer. Set before `on_gone` is called."""
        self.on_gone: Callable[[], None] | None = None
        """The client left before the answer was complete; called once, at once."""
        self.on_flow: Callable[[bool], None] | None = None
        """False: the client reads more slowly than we write, stop producing. True: go on."""

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header; `name` in lower case."""
        return find(self.headers, name)

    @property
    def gone(self) -> bool:
        """The client left, or the answer is complete."""
        return self._connection is None

    @property
    def started(self) -> bool:
        """A response head went out."""
        return self._stage is not Stage.WAITING

    def respond(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        """A whole response. `content-length` is added here and must not be in `headers`."""
        connection = self._connection
        if connection is None:
            return
        assert self._stage is Stage.WAITING, self._stage
        if self.upload is not None and not self.upload.complete:
            self.keep_alive = False
        parts = self._head(status, headers)
        if status not in BODYLESS_STATUS:
            parts.append(b"content-length: %d\r\n\r\n" % len(body))
            if self.method != "HEAD":
                parts.append(body)
        else:
            parts.append(b"\r\n")
        connection.send(b"".join(parts))
        self._done(connection)

    def interim(self, status: int, headers: Sequence[Header]) -> None:
        """A 1xx answer ahead of the real one. A client of HTTP/1.0 knows none and gets none."""
        if self._connection is None or self._stage is not Stage.WAITING or self.version == "1.0":
            return
        parts = [status_line(status)]
        append_headers(parts, headers)
        self._connection.send(b"".join((*parts, b"\r\n")))

    def start(self, status: int, headers: Sequence[Header], first: bytes = b"") -> None:
        """Begin a streamed response: framed by `content-length` if `headers` has one, else in chunks.

        `first` bytes of the body leave in the same packet as the head (every write is a system call).
        """
        connection = self._connection
        if connection is None:
            return
        assert self._stage is Stage.WAITING, self._stage
        if self.upload is not None and not self.upload.complete:
            self.keep_alive = False
        self._choose_framing(status, headers)
        parts = self._head(status, headers)
        parts.append(b"transfer-encoding: chunked\r\n\r\n" if self._framing is Framing.CHUNKED else b"\r\n")
        self._stage = Stage.STREAMING
        framed = self._framed(first) if first else b""
        if framed is None:
            self.abort()
            return
        parts.append(framed)
        connection.send(b"".join(parts))

    def write(self, data: bytes) -> None:
        """Some bytes of the body, sent as they are."""
        connection = self._connection
        if connection is None or not data:
            return
        assert self._stage is Stage.STREAMING, self._stage
        framed = self._framed(data)
        if framed is None:
            self.abort()
        elif framed:
            connection.send(framed)

    def _framed(self, data: bytes) -> bytes | None:
        """None: more than was declared, and the surplus would be read as the next response."""
        if self._framing is Framing.CHUNKED:
            return b"%x\r\n%b\r\n" % (len(data), data)
        if self._framing is Framing.LENGTH:
            self._bytes_due -= len(data)
            return None if self._bytes_due < 0 else data
        return data if self._framing is Framing.CLOSE else b""

    def finish(self, trailers: Sequence[Header] = ()) -> None:
        """The body is complete. A body shorter than its declared length is broken off instead.

        `trailers` need a chunked body, and are dropped where there is none.
        """
        connection = self._connection
        if connection is None:
            return
        assert self._stage is Stage.STREAMING, self._stage
        if self._framing is Framing.LENGTH and self._bytes_due > 0:
            self.abort()
            return
        if self._framing is Framing.CHUNKED:
            connection.send(last_chunk(trailers) if trailers else b"0\r\n\r\n")
        elif self._framing is Framing.CLOSE:
            self.keep_alive = False
        self._done(connection)

    def abort(self) -> None:
        """Break the connection: what was written leaves, and the client sees the answer as broken, not as complete."""
        connection = self._connection
        if connection is None:
            return
        self._close()
        connection.break_off(framed=self._framing is not Framing.CLOSE)

    def client_left(self) -> None:
        """Called by the connection only."""
        on_gone = self.on_gone
        self._close()
        if on_gone is not None:
            on_gone()

    def spoil(self, spoilt: Spoilt) -> None:
        """Called by the connection only, which answers the client, unless an answer has begun: that is broken off."""
        self.spoilt = spoilt
        on_gone = self.on_gone
        if self.started:
            self.abort()
        else:
            self._close()
        if on_gone is not None:
            on_gone()

    def _head(self, status: int, headers: Sequence[Header]) -> list[bytes]:
        parts = [status_line(status)]
        append_headers(parts, headers)
        if not self.keep_alive:
            parts.append(b"connection: close\r\n")
        elif self.version == "1.0":
            parts.append(b"connection: keep-alive\r\n")
        return parts

    def _choose_framing(self, status: int, headers: Sequence[Header]) -> None:
        if self.method == "HEAD" or status in BODYLESS_STATUS:
            self._framing = Framing.NONE
            return
        declared = find(headers, b"content-length")
        if declared is not None:
            self._framing = Framing.LENGTH
            self._bytes_due = int(declared)
        elif self.version == "1.0":
            self._framing = Framing.CLOSE
            self.keep_alive = False
        else:
            self._framing = Framing.CHUNKED

    def _done(self, connection: Connection) -> None:
        self._close()
        connection.exchange_done(self)

    def _close(self) -> None:
        """The handlers go as well: they hold the handler's state, which holds this exchange."""
        if self.upload is not None:
            self.upload.forget()
        self._connection = self.on_gone = self.on_flow = None
        self._stage = Stage.DONE
