"""A process's end of the line to its group: what it books and binds goes out, what its siblings do comes in.

Bindings leave in the same turn of the loop in which they are made. Load goes out when it has changed, at most every
`LOAD_INTERVAL_S`. Receipts travel in small batches; when the group does not keep up they are dropped and counted, as
with a slow disk. A line that breaks means that the group is gone: the process then drains and ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import cast

from kvrelay.core.model.effects import ShareSession
from kvrelay.core.model.events import Event, SessionPlaced, SiblingReported
from kvrelay.core.model.siblings import Placement, SiblingLoad
from kvrelay.core.routing.router import Router
from kvrelay.edge.group.frames import Failed, FrameReader, Kind, Told, decode_number, decode_told, encode, frame

LOAD_INTERVAL_S = 0.05
SAY_AGAIN_EVERY = 20  # intervals: a worker may have been unknown to a sibling when its load was told
RECEIPT_BATCH_S = 0.02
MAX_UNSENT_BYTES = 64 * 2**20
PLACEMENTS_PER_FRAME = 1000

log = logging.getLogger(__name__)


class Link(asyncio.Protocol):
    """Also the writer of the process's receipts."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._feed: Callable[[Event], None] | None = None
        self._router: Router | None = None
        self._early: list[Told] = []
        self._placements: list[Placement] = []
        self._lines: list[bytes] = []
        self.lost = 0  # the group counts what it cannot write
        self._unsent_bytes = 0
        self._loads: tuple[SiblingLoad, ...] = ()
        self._until_said_again = 0
        self._load_timer: asyncio.TimerHandle | None = None
        self.group_lost = False  # without a word: it was killed
        self._hung_up = asyncio.Event()
        self.drain_asked = asyncio.Event()
        self.cut_asked = asyncio.Event()

    def attach(self, router: Router, feed: Callable[[Event], None]) -> None:
        """From here on the router hears its siblings, and they hear of it."""
        self._router, self._feed = router, feed
        early, self._early = self._early, []
        for told in early:
            self._hear(told)
        self._say_load()

    def share(self, effect: ShareSession) -> None:
        if not self._placements:
            self._loop.call_soon(self._say_placements)
        self._placements.append(effect.placement)

    def say(self, kind: Kind, payload: bytes = b"") -> None:
        if self._transport is not None:
            self._transport.write(frame(kind, payload))

    def failed(self, problem: Exception) -> None:
        self.say(Kind.FAILED, encode(Failed.of(problem)))

    # --- receipts ----------------------------------------------------------------------------------------------------

    def put(self, line: bytes) -> bool:
        transport = self._transport
        if transport is None or self._unsent_bytes + transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            return False
        if not self._lines:
            self._loop.call_later(RECEIPT_BATCH_S, self.flush)
        self._lines.append(line)
        self._unsent_bytes += len(line)
        return True

    def flush(self) -> None:
        lines, self._lines, self._unsent_bytes = self._lines, [], 0
        if lines:
            self.say(Kind.RECEIPTS, b"".join(lines))

    def close(self) -> None:
        """The receipts are complete; the line stays open for last words."""
        self.flush()

    # --- the line ----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.say(Kind.HELLO, encode(self._process))

    def data_received(self, data: bytes) -> None:
        for kind, payload in self._reader.feed(data):
            match kind:
                case Kind.TOLD:
                    self._hear(decode_told(payload))
                case Kind.GONE:
                    self._hear(Told(decode_number(payload), loads=()))
                case Kind.TELL_ALL:
                    self._tell_all()
                case Kind.DRAIN:
                    self.drain_asked.set()
                case Kind.CUT:
                    self.drain_asked.set()
                    self.cut_asked.set()
                case _:
                    raise AssertionError(kind)

    def connection_lost(self, exc: Exception | None) -> None:
        hung_up, self._transport = self._transport is None, None
        self._hung_up.set()
        self.stop_talking()
        if not hung_up and not self.drain_asked.is_set():
            log.error("group_lost: this process takes no new requests and ends")
            self.group_lost = True
            self.drain_asked.set()

    def stop_talking(self) -> None:
        """No timers after this."""
        if self._load_timer is not None:
            self._load_timer.cancel()
            self._load_timer = None

    async def hang_up(self) -> None:
        """After everything that was said has left."""
        self.stop_talking()
        transport, self._transport = self._transport, None
        if transport is None:
            return
        transport.close()
        await self._hung_up.wait()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _hear(self, told: Told) -> None:
        if self._feed is None:
            self._early.append(told)
            return
        for placement in told.placements:
            self._feed(SessionPlaced(placement))
        if told.loads is not None:
            self._feed(SiblingReported(told.process, told.loads))

    def _say_placements(self) -> None:
        placements, self._placements = self._placements, []
        self._tell(placements)

    def _tell(self, placements: list[Placement]) -> None:
        for at in range(0, len(placements), PLACEMENTS_PER_FRAME):
            part = tuple(placements[at : at + PLACEMENTS_PER_FRAME])
            self.say(Kind.TOLD, encode(Told(self._process, placements=part)))

    def _tell_all(self) -> None:
        if self._router is not None:
            self._tell(list(self._router.placements()))

    def _say_load(self) -> None:
        assert self._router is not None
        loads = self._router.booked_load()
        if loads != self._loads or self._until_said_again <= 0:
            self._loads, self._until_said_again = loads, SAY_AGAIN_EVERY
            self.say(Kind.TOLD, encode(Told(self._process, loads=loads)))
        self._until_said_again -= 1
        self._load_timer = self._loop.call_later(LOAD_INTERVAL_S, self._say_load)


async def connect(path: Path, process: int) -> Link:
    """Raises OSError."""
    link: Link
    _, link = await asyncio.get_running_loop().create_unix_connection(lambda: Link(process), str(path))
    return link
