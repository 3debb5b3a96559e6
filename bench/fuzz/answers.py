"""Cases for the gateway's own HTTP client: what a worker may answer, and what comes from one that has gone mad.

Wrong answers come from a worker of their own: bytes that follow an answer may be taken for the next one by any client
that has asked again meanwhile, so nothing can be promised to the next client of such a worker.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from bench.fuzz.connection import HANG_S, Connection, in_pieces
from bench.fuzz.echo import echoed
from bench.fuzz.finding import BrokenPromise
from bench.fuzz.mutate import mutated
from bench.fuzz.strict import Message

if TYPE_CHECKING:
    from bench.fuzz.rig import Rig

LINGER_S = 0.1  # a mad worker keeps its connection for so long, that it be used again perhaps
SANE, MAD = "sane", "mad"  # workers, and their models
STATUSES = (200,) * 6 + (201, 204, 206, 301, 304, 400, 404, 418, 422, 451, 299, 499)
HARMLESS_HEADERS = (
    b"Content-Type: application/json",
    b"content-type: text/event-stream",
    b"X-Empty:",
    b"X-Bytes: \xe9\xff",
    b"Set-Cookie: a=1",
    b"Set-Cookie: b=2",
    b"Connection: keep-alive",
    b"Connection: x-hop",
    b"X-Hop: 1",
    b"Keep-Alive: timeout=1",
    b"Retry-After: 1",
    b"x-kvrelay-worker: somebody",
    b"X-Long: " + b"v" * 5000,
    b"Trailer: x-t",
)
DEEP = b'{"a":' * 30_000
EVENTS = (
    b'data: {"choices":[{"text":"a"}]}\n\n',
    b"data: [DONE]\n\n",
    b": comment\n\n",
    b'{"error":{"message":"stream_options?"}}',
    b'data: {"choices":[],"usage":{"prompt_tokens":1}}\n\n',
    b"event: message_stop\ndata: {}\n\n",
    b"data: " + DEEP + b"\n\n",
    b'data: {"choices":[],"usage":{"prompt_tokens":' + DEEP + b"\n\n",
    b'{"usage":' + DEEP,
    b'{"usage":{"prompt_tokens":-1,"completion_tokens":1e400}}',
    b'{"usage":{"prompt_tokens":99999999999999999999999,"prompt_tokens_details":[]}}',
)
SURPLUS = (
    b"",
    b"\r\n",
    b"HTTP/1.1 200 OK\r\nx-id: stale\r\ncontent-length: 5\r\n\r\nstale",
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"\0",
    b"stale" * 10_000,
)
RETRY_AFTERS = (b"9" * 400, b"-1", b"1e9", b"\xb2", b"Wed, 21 Oct 2015 07:28:00 GMT", b" 3 ", b"0", b"")


class Plan:
    """One answer of the worker: its bytes, how they come, and what becomes of the connection."""

    def __init__(self, chance: random.Random, *, head: bool) -> None:
        """`head`: it answers a HEAD. A body that comes all the same is surplus; only then is nothing else wrong."""
        self.status = chance.choice(STATUSES)
        self.body = b"" if self.status in (204, 304) else _body(chance)
        self.closes = chance.random() < 0.3
        self.exact = head or chance.random() < 0.4
        raw = self._well_formed(chance, head=head)
        if not self.exact:
            raw = _spoiled(chance, raw)
        surplus = chance.choice(SURPLUS) if chance.random() < 0.3 and not self.closes else b""
        self.sane = self.exact and not surplus and not (head and raw.partition(b"\r\n\r\n")[2])
        self.falls_silent = chance.random() < 0.03  # then it is the gateway's timeout that ends what never ends
        self.pieces = in_pieces(chance, raw + surplus)

    def _well_formed(self, chance: random.Random, *, head: bool) -> bytes:
        lines = [b"HTTP/1.1 %d %b" % (self.status, chance.choice((b"OK", b"", b"\xe9 x")))]
        lines += [b"x-method: HEAD"] * head
        lines += chance.sample(HARMLESS_HEADERS, chance.randrange(0, 6))
        body = self.body
        if self.status not in (204, 304):
            match chance.randrange(3):
                case 0:
                    lines.append(b"Content-Length: %d" % len(body))
                case 1:
                    lines.append(b"Transfer-Encoding: chunked")
                    body = _chunked(chance, body)
                case _:
                    lines.append(b"Connection: close")
                    self.closes = True
        interim = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" * chance.choice((0, 0, 0, 1, 3))
        said = b"" if head and chance.random() < 0.5 else body
        return interim + b"\r\n".join(lines) + b"\r\n\r\n" + said

    async def carry_out(self, writer: asyncio.StreamWriter) -> bool:
        for piece in self.pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if self.sane or self.closes or self.falls_silent:
            return not self.closes
        await asyncio.sleep(LINGER_S)
        return False


class Case:
    """A request that gets the planned answer, and one after it that gets its own, on this connection or another."""

    def __init__(self, chance: random.Random, number: int) -> None:
        self._name = f"{number}"
        self._head = chance.random() < 0.1
        self.plan = Plan(chance, head=self._head)
        self._stream = chance.random() < 0.3
        self._same_connection = chance.random() < 0.5

    @property
    def raw(self) -> bytes:
        return b"".join(self.plan.pieces)

    async def run(self, rig: Rig) -> None:
        plans = rig.plans
        plans[self._name.encode()] = self.plan
        try:
            await self._converse(rig.port)
        finally:
            del plans[self._name.encode()]

    async def _converse(self, port: int) -> None:
        async with Connection(port) as connection:
            await connection.write([self._request()])
            answers = await connection.read_until(bool, patience_s=HANG_S)
            if not answers and not connection.closed:
                raise BrokenPromise("no request hangs", f"received {connection.data[-500:]!r}")
            self._judge(answers)
            if self._same_connection and not connection.closed and answers[0].value(b"connection") != b"close":
                await self._ask_again(connection, len(answers))
                return
        async with Connection(port) as connection:
            await self._ask_again(connection, 0)

    def _request(self) -> bytes:
        method = b"HEAD" if self._head else b"POST"
        model = SANE if self.plan.sane else MAD
        body = b'{"model":"%b","prompt":[1],"stream":%b}' % (model.encode(), b"true" if self._stream else b"false")
        head = b"%b /v1/completions HTTP/1.1\r\nHost: x\r\nx-plan: %b\r\ncontent-length: %d\r\n\r\n"
        return head % (method, self._name.encode(), len(body)) + body

    def _judge(self, answers: list[Message]) -> None:
        """The answer is the worker's, when that is well-formed; else anything that is HTTP, or a broken connection."""
        if not self.plan.sane:
            return
        body = b"" if self._head else self.plan.body
        if not answers or (answers[0].status, answers[0].body) != (self.plan.status, body):
            raise BrokenPromise("a well-formed answer passes as it is", f"{self.plan.status}, received {answers}")

    async def _ask_again(self, connection: Connection, before: int) -> None:
        """Whatever the worker did, the next request gets its own answer."""
        name = f"{self._name}-next"
        body = b'{"model":"%b"}' % SANE.encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nx-id: %b\r\ncontent-length: %d\r\n\r\n"
        await connection.write([head % (name.encode(), len(body)) + body])
        answers = await connection.read_until(lambda each: len(each) > before, patience_s=HANG_S)
        expected = echoed(name, "POST", "/v1/completions", body)
        if len(answers) != before + 1 or answers[-1].body != expected:
            raise BrokenPromise(
                "the next request gets its own answer", f"{answers[before:]}, {connection.data[-500:]!r}"
            )


async def answer_as_planned(plans: dict[bytes, Plan], message: Message, writer: asyncio.StreamWriter) -> bool:
    """The worker's side."""
    plan = plans.get(message.value(b"x-plan") or b"")
    return False if plan is None else await plan.carry_out(writer)


def _body(chance: random.Random) -> bytes:
    match chance.randrange(5):
        case 0:
            return b""
        case 1:
            return chance.randbytes(chance.randrange(1, 300))
        case 2:
            return b"".join(chance.choice(EVENTS) for _ in range(chance.randrange(1, 9)))
        case 3:
            return chance.choice(EVENTS[:5]) * chance.randrange(1, 400)
        case _:
            return chance.randbytes(chance.randrange(1, 400_000))


def _chunked(chance: random.Random, body: bytes) -> bytes:
    chunks = []
    position = 0
    while position < len(body):
        piece = body[position : position + chance.choice((1, 10, 1000, 100_000))]
        chunks.append(b"%x\r\n%b\r\n" % (len(piece), piece))
        position += len(piece)
    return b"".join(chunks) + b"0\r\n" + chance.choice((b"", b"x-t: 1\r\n")) + b"\r\n"


def _spoiled(chance: random.Random, raw: bytes) -> bytes:
    match chance.randrange(6):
        case 0:
            return chance.randbytes(chance.randrange(0, 400))
        case 1:
            return raw[: chance.randrange(len(raw) + 1)]
        case 2:
            retry_after = b"Retry-After: " + chance.choice(RETRY_AFTERS)
            status = chance.choice((b"429", b"503", b"500", b"502", b"999", b"600"))
            return b"HTTP/1.1 %b no\r\n%b\r\nContent-Length: 2\r\n\r\nno" % (status, retry_after)
        case 3:
            return b"HTTP/1.1 100 Continue\r\n\r\n" * chance.randrange(1, 2000) + raw
        case _:
            return mutated(chance, raw, within=max(1, raw.find(b"\r\n\r\n")))
