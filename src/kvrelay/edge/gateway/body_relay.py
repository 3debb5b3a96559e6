"""A request body on its way through: from the client's connection to the worker's, never whole in memory.

    begin -> first bytes -> (routing) -> attempt -> accepted -> the rest, as fast as the slower of the two sides
                               ^            |
                               +------------+ not accepted: the first bytes are still here for another worker

After `accepted` nobody has the body any more, so nobody can send it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvrelay.edge.http.client import Call
from kvrelay.edge.http.heads import Header, chunk, last_chunk
from kvrelay.edge.http.upload import Upload

FIRST_BYTES = 16 * 1024  # what is waited for before routing, as a form says in its first fields which model it is for


class BodyRelay:
    """One per streamed request. `ready` is called once, when the first bytes are there."""

    __slots__ = ("_call", "_ended", "_ready", "_trailers", "_upload", "first", "spent")

    def __init__(self, upload: Upload, ready: Callable[[], None]) -> None:
        self.first = b""
        self.spent = False
        """A worker has bytes of it that we have not."""
        self._upload = upload
        self._ready: Callable[[], None] | None = ready
        self._call: Call | None = None
        self._ended = False
        self._trailers: Sequence[Header] = ()
        upload.on_data = self._on_data
        upload.on_end = self._on_end

    def begin(self) -> None:
        self._upload.set_flow(True)

    @property
    def framing(self) -> bytes:
        """The header line that goes with what is sent: as the client framed it."""
        declared_bytes = self._upload.declared_bytes
        if declared_bytes is None:
            return b"transfer-encoding: chunked\r\n"
        return b"content-length: %d\r\n" % declared_bytes

    def framed_first(self) -> bytes:
        return self._framed(self.first)

    def attempt(self, call: Call) -> None:
        """This call was begun with `framed_first()`; the rest will follow it there."""
        self._call = call

    def accepted(self) -> None:
        assert self._call is not None
        self.spent = True
        self.first = b""
        if self._ended:
            self._end_body(self._call)
        else:
            self.set_flow(self._call.writable)

    def set_flow(self, wanted: bool) -> None:
        """What the worker's connection says of itself."""
        if self.spent:
            self._upload.set_flow(wanted)

    def close(self) -> None:
        """The attempt is over, whatever is left of the body; another may follow if this one was not accepted."""
        self._call = None

    # --- what the client sends ---------------------------------------------------------------------------------------

    def _on_data(self, data: bytes) -> None:
        if self.spent:
            if self._call is not None:
                self._call.send(self._framed(data))
            return
        self.first += data
        if len(self.first) >= FIRST_BYTES:
            self._upload.set_flow(False)
            self._tell_ready()

    def _on_end(self, trailers: Sequence[Header]) -> None:
        self._ended = True
        self._trailers = trailers
        if not self.spent:
            self._tell_ready()
        elif self._call is not None:
            self._end_body(self._call)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _tell_ready(self) -> None:
        ready, self._ready = self._ready, None
        if ready is not None:
            ready()

    def _end_body(self, call: Call) -> None:
        call.end_body(last_chunk(self._trailers) if self._upload.declared_bytes is None else b"")

    def _framed(self, data: bytes) -> bytes:
        return chunk(data) if self._upload.declared_bytes is None and data else data
