"""A request body that its handler takes while it arrives, instead of getting it whole.

Nothing of it is asked for until the handler says so (`set_flow(True)`): a client that waits for `100 Continue` is not
told to go on before that. What was read when the handler says stop is kept here until it goes on: one read at most, as
the connection is not read any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvrelay.edge.http.heads import Header


class Source(Protocol):
    """The connection that the body comes on."""

    def set_body_flow(self, wanted: bool) -> None: ...


class Upload:
    """The handler sets both callbacks before it first asks. None comes after `on_end`, or when the exchange is over."""

    __slots__ = ("_held", "_source", "_trailers", "_wanted", "complete", "declared_bytes", "on_data", "on_end")

    def __init__(self, source: Source, declared_bytes: int | None) -> None:
        self._source: Source | None = source
        self._wanted = False
        self._held: list[bytes] = []
        self._trailers: Sequence[Header] = ()
        self.declared_bytes = declared_bytes
        """None: it comes in chunks, and its end is known when it is there."""
        self.complete = False
        """All of it was read. The handler may not have heard so yet."""
        self.on_data: Callable[[bytes], None] | None = None
        self.on_end: Callable[[Sequence[Header]], None] | None = None

    def set_flow(self, wanted: bool) -> None:
        """True: go on, now and until further notice. False: stop, the client is to wait."""
        source = self._source
        if source is None or wanted is self._wanted:
            return
        self._wanted = wanted
        if wanted:
            self._hand_over()
        if not self.complete:
            source.set_body_flow(self._wanted)

    # --- what the connection calls -----------------------------------------------------------------------------------

    def take(self, data: bytes) -> None:
        self._held.append(data)
        if self._wanted:
            self._hand_over()

    def end(self, trailers: Sequence[Header]) -> None:
        self.complete = True
        self._trailers = trailers
        if self._wanted:
            self._hand_over()

    def forget(self) -> None:
        """The exchange is over: whoever listened is let go, and what still comes is of no interest."""
        self._source = self.on_data = self.on_end = None
        self._held = []

    # --- inside ------------------------------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        """The handler may say stop, or end the exchange, in the middle of this."""
        if self._held and self.on_data is not None:
            held, self._held = self._held, []
            self.on_data(held[0] if len(held) == 1 else b"".join(held))
        if self.complete and self._wanted and not self._held and self.on_end is not None:
            on_end, self.on_end = self.on_end, None
            on_end(self._trailers)
