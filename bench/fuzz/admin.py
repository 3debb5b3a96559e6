"""Cases for the admin port: every route it has, with bodies, names and queries that nobody would send."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from bench.fuzz.connection import HANG_S, Connection
from bench.fuzz.finding import BrokenPromise
from bench.fuzz.mutate import mutated
from bench.fuzz.strict import Message

if TYPE_CHECKING:
    from bench.fuzz.rig import Rig

METHODS = ("GET", "GET", "POST", "POST", "PUT", "DELETE", "PATCH", "HEAD")
WORDS = (
    "",
    "sane",
    "mad",
    "drain",
    "resume",
    "resync",
    "cache_load",
    "round_robin",
    "predict",
    "mock",
    "vllm",
    "http://127.0.0.1:9",
    "http://127.0.0.1:9/v1/",
    "http://[::1]:9",
    "http://127.0.0.1:99999",
    "http://[",
    "http://user:secret@127.0.0.1:9",
    "ftp://127.0.0.1",
    "tcp://127.0.0.1:9",
    "tcp://*:0",
    "tcp://127.0.0.1:0x1",
    "ipc://",
    "inproc://x",
    "../../etc/passwd",
    "a/b",
    "a\0b",
    "line\nbreak\r\nX-Injected: 1",
    "\N{WAVE DASH}\U0001f30a",
    "\ud800",
    "²",
    "٣",
    "-1",
    "0",
    "1e9",
    "9" * 400,
    "x" * 1000,
    "nan",
    "true",
    "__proto__",
    "%00%ff",
)
NUMBERS = (0, -1, 1, 2**31, 2**63, 2**64, -(2**70), 10**400, 0.0, -0.0, 1e308, 1.5)
MEMBERS = (
    *("url", "name", "model", "events", "replay", "topic", "adapter", "role", "max_active_requests", "api_key_file"),
    *(
        "policy",
        "scorer",
        "prompt",
        "messages",
        "tools",
        "model",
        "stream",
        "stream_options",
        "max_tokens",
        "cache_salt",
    ),
    *("content", "type", "text", "input", "tenant", "epoch", "session_id", "add_generation_prompt", "chat_template"),
)
QUERIES = ("limit", "path", "request_id", "worker", "since", "status")
SAFE_TARGETS = ("/admin/status", "/metrics", "/admin/workers")


class Case:
    """One request. Its answer must be no failure of ours, and a right one must get its answer behind it."""

    def __init__(self, chance: random.Random, number: int) -> None:
        self._chance = chance
        self.sent = b""

    @property
    def raw(self) -> bytes:
        return self.sent

    async def run(self, rig: Rig) -> None:
        self.sent = self._request(rig.admin_routes)
        port = rig.admin_port
        async with Connection(port) as connection:
            await connection.write([self.sent])
            answers = await connection.read_until(bool, patience_s=HANG_S)
            self._judge(answers, connection)
        async with Connection(port) as connection:
            target = self._chance.choice(SAFE_TARGETS).encode()
            await connection.write([b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % target])
            answers = await connection.read_until(bool, patience_s=HANG_S)
            if not answers or answers[0].status != 200:
                raise BrokenPromise("the admin port stays well", f"{target!r}: {connection.data[-2000:]!r}")

    def _judge(self, answers: list[Message], connection: Connection) -> None:
        if not answers:
            if connection.closed:
                return
            raise BrokenPromise("no admin request hangs", f"received {connection.data[-500:]!r}")
        answer = answers[0]
        if answer.status == 500:
            raise BrokenPromise("the admin port never fails", f"{answer.body[:2000]!r}")
        if answer.values(b"x-injected"):
            raise BrokenPromise("no header can be put in", repr(answer.headers))
        if answer.status >= 400 or answer.value(b"content-type") == b"application/json":
            _check_json(answer)

    def _request(self, routes: list[str]) -> bytes:
        chance = self._chance
        method = chance.choice(METHODS)
        target = "/".join(self._segment(part) for part in chance.choice(routes).split("/"))
        if chance.random() < 0.4:
            pairs = [
                f"{chance.choice(QUERIES)}={quote(chance.choice(WORDS), errors='surrogatepass')}"
                for _ in range(chance.randrange(1, 3))
            ]
            target += "?" + "&".join(pairs)
        body = b"" if method in ("GET", "HEAD") and chance.random() < 0.8 else self._body()
        headers = [b"%b %b HTTP/1.1" % (method.encode(), target.encode("ascii")), b"Host: x"]
        headers.append(b"content-length: %d" % len(body))
        headers += [b"x-method: HEAD"] * (method == "HEAD")
        if chance.random() < 0.3:
            headers.append(
                chance.choice(
                    (b"x-session-id: \xff\xfe", b"content-type: text/x", b"Origin: http://x", b"Accept: \xe9")
                )
            )
        if method == "HEAD" or chance.random() < 0.1:
            headers.append(b"connection: close")
        return b"\r\n".join(headers) + b"\r\n\r\n" + body

    def _segment(self, part: str) -> str:
        """A placeholder of a route gets some word."""
        if not part.startswith("{"):
            return part
        return quote(self._chance.choice(WORDS) or "x", safe="", errors="surrogatepass")

    def _body(self) -> bytes:
        chance = self._chance
        match chance.randrange(6):
            case 0:
                return chance.randbytes(chance.randrange(0, 200))
            case 1:
                return b"[" * chance.randrange(1, 100_000)
            case 2:
                return b'{"a":' * chance.randrange(1, 20_000) + b"1"
            case _:
                text = json.dumps(self._value(3, at_top=True), ensure_ascii=chance.random() < 0.5)
                body = text.encode("utf-8", "surrogatepass")
                return mutated(chance, body) if chance.random() < 0.2 else body

    def _value(self, depth: int, *, at_top: bool = False) -> Any:
        chance = self._chance
        kind = 0 if at_top and chance.random() < 0.9 else chance.randrange(6 if depth else 4)
        match kind:
            case 0 if depth:
                names = chance.sample(MEMBERS, chance.randrange(0, 5))
                return {name: self._value(depth - 1) for name in names}
            case 4 | 5:
                return [self._value(depth - 1) for _ in range(chance.choice((0, 1, 2, 40)))]
            case 1:
                return chance.choice(NUMBERS)
            case 2:
                return chance.choice((None, True, False))
            case _:
                return chance.choice(WORDS)


def _check_json(answer: Message) -> None:
    """Also a refusal, a 502 included, is one in our words."""
    try:
        said = json.loads(answer.body)
    except ValueError as problem:
        raise BrokenPromise("answers are JSON", f"{answer}") from problem
    if answer.status >= 400 and not (isinstance(said, dict) and said.get("error", {}).get("message")):
        raise BrokenPromise("a refusal says why", f"{answer}")
