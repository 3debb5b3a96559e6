"""The group's end of the lines to its processes. It passes on what they tell each other without looking into it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import cast

from kvrelay.edge.group.frames import FrameReader, Kind, decode_number, encode, frame
from kvrelay.edge.observe.receipt_log import LineWriter

MAX_UNHEARD_BYTES = 64 * 2**20  # of one process that does not listen; it learns of the load again soon enough

log = logging.getLogger(__name__)


class Hub:
    """`on_word(process, kind, payload)` hears READY, FAILED and ENDED."""

    def __init__(self, on_word: Callable[[int, Kind, bytes], None]) -> None:
        self.receipts: LineWriter | None = None
        self._on_word = on_word
        self._lines: dict[int, HubLine] = {}
        self._open: dict[HubLine, None] = {}
        self._server: asyncio.Server | None = None
        self._all_closed = asyncio.Event()
        self.receipts_dropped = 0

    @property
    def processes(self) -> tuple[int, ...]:
        """Those that are on the line."""
        return tuple(self._lines)

    async def listen(self, path: Path) -> None:
        self._server = await asyncio.get_running_loop().create_unix_server(lambda: HubLine(self), str(path))

    async def close(self, within_s: float) -> None:
        """Waits until the processes have hung up, so that nothing that they said is lost."""
        if self._server is not None:
            self._server.close()
        await self.all_hung_up(within_s)
        for line in tuple(self._open):
            line.cut()

    async def all_hung_up(self, within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                while self._open:
                    self._all_closed.clear()
                    await self._all_closed.wait()
        except TimeoutError:
            log.error("lines to processes were still open: lines=%d", len(self._open))

    def say(self, kind: Kind, payload: bytes = b"", *, process: int | None = None) -> None:
        """To one process, or to all."""
        for number, line in tuple(self._lines.items()):
            if process is None or number == process:
                line.send(frame(kind, payload))

    # --- what lines call ---------------------------------------------------------------------------------------------

    def opened(self, line: HubLine) -> None:
        self._open[line] = None

    def heard(self, line: HubLine, kind: Kind, payload: bytes) -> None:
        match kind:
            case Kind.HELLO:
                line.process = decode_number(payload)
                one_that_knows = next(iter(self._lines), None)
                self._lines[line.process] = line
                if one_that_knows is not None:
                    self.say(Kind.TELL_ALL, process=one_that_knows)
            case Kind.TOLD:
                self._pass_on(line, frame(kind, payload))
            case Kind.RECEIPTS:
                self._write(payload)
            case _:
                self._on_word(line.process, kind, payload)

    def closed(self, line: HubLine) -> None:
        self._open.pop(line, None)
        if self._lines.get(line.process) is line:
            del self._lines[line.process]
            self.say(Kind.GONE, encode(line.process))
        if not self._open:
            self._all_closed.set()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _pass_on(self, sender: HubLine, data: bytes) -> None:
        for line in tuple(self._lines.values()):
            if line is not sender:
                line.send(data)

    def _write(self, payload: bytes) -> None:
        if self.receipts is None:
            return
        for receipt in payload.splitlines(keepends=True):
            if not self.receipts.put(receipt):
                self.receipts_dropped += 1
                if self.receipts_dropped == 1 or self.receipts_dropped % 1000 == 0:
                    log.error("receipts dropped: the disk does not keep up; dropped=%d", self.receipts_dropped)


class HubLine(asyncio.Protocol):
    """To one process."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self.process = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._hub.opened(self)

    def data_received(self, data: bytes) -> None:
        for kind, payload in self._reader.feed(data):
            self._hub.heard(self, kind, payload)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._hub.closed(self)

    def send(self, data: bytes) -> None:
        if self._transport is not None and self._transport.get_write_buffer_size() < MAX_UNHEARD_BYTES:
            self._transport.write(data)

    def cut(self) -> None:
        if self._transport is not None:
            self._transport.abort()
