"""The client's side of one connection: writes in pieces, reads until there is a reason to stop."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from types import TracebackType
from typing import Self

from bench.fuzz.finding import BrokenPromise
from bench.fuzz.strict import Message, NotHttp, read_answers

HANG_S = 20.0  # generous: what takes longer than this is stuck, whatever else the machine does


class Connection:
    """Use as a context. `data` is all that came."""

    def __init__(self, port: int) -> None:
        self.data = b""
        self.closed = False
        self._port = port

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._writer.close()

    async def write(self, pieces: list[bytes]) -> None:
        """Each piece in a packet of its own, as far as that can be had. A side that closes early is no fault."""
        try:
            for piece in pieces:
                self._writer.write(piece)
                await self._writer.drain()
                await asyncio.sleep(0)
        except ConnectionError:
            pass

    async def read_until(self, enough: Callable[[list[Message]], bool], *, patience_s: float) -> list[Message]:
        """All answers so far, when they are enough, the connection ended, or nothing came for `patience_s`.

        Raises BrokenPromise if what came is not HTTP.
        """
        while not self.closed and not enough(self.answers()):
            try:
                more = await asyncio.wait_for(self._reader.read(2**16), patience_s)
            except TimeoutError:
                break
            except ConnectionError:
                more = b""
            self.data += more
            self.closed = not more
        return self.answers()

    async def end(self) -> list[Message]:
        """Close the sending side; the other side must then close soon."""
        if not self.closed:
            try:
                self._writer.write_eof()
            except (OSError, RuntimeError):
                pass
            await self.read_until(lambda _: False, patience_s=HANG_S)
            if not self.closed:
                raise BrokenPromise("no connection hangs", "still open long after the client closed its side")
        return self.answers()

    def answers(self) -> list[Message]:
        try:
            answers, _ = read_answers(self.data)
        except NotHttp as problem:
            raise BrokenPromise("answers are well-formed", f"{problem}; received {self.data[-2000:]!r}") from problem
        return answers


def in_pieces(chance: random.Random, data: bytes) -> list[bytes]:
    """At once, cut at some places, or in very small pieces at the beginning."""
    match chance.randrange(4):
        case 0:
            return [data]
        case 1:
            few = min(len(data), 40)
            return [data[i : i + 1] for i in range(few)] + [data[few:]]
        case _:
            places = sorted(chance.randrange(len(data) + 1) for _ in range(chance.randrange(1, 8)))
            cuts = [0, *places, len(data)]
            return [data[a:b] for a, b in itertools.pairwise(cuts) if b > a]
