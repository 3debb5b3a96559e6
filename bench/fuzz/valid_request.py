"""Well-formed requests in every shape that the protocol allows, with what the worker must get of them."""

from __future__ import annotations

import random

from msgspec import Struct

from bench.fuzz.echo import echoed

METHODS = ("POST",) * 6 + ("GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "REPORT")
TARGETS = (
    b"/v1/completions",
    b"/v1/chat/completions",
    b"/v1/responses?a=1",
    b"/v1//x/../y;z?q=%00%2F&r",
    b"/" + b"long" * 500,
    b"/%C3%BC?%FF&a=[1]|{}",
    b"/v1/models/x",
)
HIDDEN = b"GET /smuggled HTTP/1.1\r\nHost: x\r\nx-id: smuggled\r\n\r\n"
OPEN = HIDDEN.replace(b"smuggled", b"open")  # where wrong bytes may well make a request of a body
MEMBERS = (
    *(b'{"prompt":', b'{"messages":', b'{"stream":true,"stream_options":', b'{"model":', b'{"max_tokens":', b'{"x":'),
    *(b'{"messages":[{"role":"user","content":', b'{"messages":[],"tools":', b'{"cache_salt":'),
)
HARMLESS_HEADERS = (
    b"Accept: */*",
    b"content-type: application/json",
    b"Content-Type:text/plain;charset=\xe9",
    b"X-Empty:",
    b"X-Spaces: \t a  b \t",
    b"X-Long: " + b"v" * 5000,
    b"Connection: keep-alive",
    b"Connection: Keep-Alive, x-hop",
    b"X-Hop: 1",
    b"Cookie: a=b; c=d",
    b"x-session-id: s-1",
    b"x-session-id: not\xfflegal",
    b"x-request-id: r 1",
    b"x-kvrelay-priority: 99999999999999999999",
    b"Authorization: Basic eA==",
    b"x-api-key: k",
    b"Keep-Alive: timeout=5",
    b"TE: trailers",
    b"Upgrade: h2c",
    b"Content-Encoding: identity",
    b"Accept-Encoding: gzip",
    b"Trailer: x-t",
)


class ValidRequest(Struct, frozen=True):
    """The bytes, and the body of the one right answer."""

    name: str
    raw: bytes
    head_bytes: int
    answer: bytes


def valid_request(
    chance: random.Random, name: str, *, method: str | None = None, embedded: bytes = OPEN
) -> ValidRequest:
    """`embedded` is the request that some bodies look like."""
    method = method or chance.choice(METHODS)
    target = chance.choice(TARGETS)
    body = b"" if method in ("GET", "HEAD", "OPTIONS", "DELETE") and chance.random() < 0.8 else _body(chance, embedded)
    shown = target
    if chance.random() < 0.1:
        shown = b"http://somebody.example:1" + target
    lines = [b"%b %b HTTP/1.1" % (method.encode(), shown), b"Host: somebody.example"]
    lines += [b"x-id: " + name.encode()]
    lines += chance.sample(HARMLESS_HEADERS, chance.randrange(0, 6))
    if chance.random() < 0.05:
        lines.append(b"Expect: 100-continue")
    framed, framing = _framed(chance, body)
    if framing is not None:
        lines.append(framing)
    first, *rest = lines
    chance.shuffle(rest)
    head = b"\r\n".join([first, *rest]) + b"\r\n\r\n"
    answer = b"" if method == "HEAD" else echoed(name, method, target.decode("latin-1"), body)
    return ValidRequest(name, head + framed, len(head), answer)


def _body(chance: random.Random, embedded: bytes) -> bytes:
    match chance.randrange(8):
        case 0:
            return b""
        case 1:
            return chance.randbytes(chance.randrange(1, 200))
        case 2:
            return embedded * chance.randrange(1, 3)
        case 3:
            return b'{"prompt":[%b],"max_tokens":2}' % b",".join(b"%d" % chance.randrange(2**18) for _ in range(60))
        case 4:
            return b'{"messages":[{"role":"user","content":"\\ud83c\\udf0a \xc3\xbc"}],"stream":false}'
        case 5:
            return chance.choice((b"", *MEMBERS)) + chance.choice((b"[", b'{"a":')) * chance.randrange(1, 20_000)
        case 6:
            return chance.randbytes(chance.randrange(60_000, 140_000))
        case _:
            return b"0\r\n\r\n" + b"\r\n" * chance.randrange(4)


def _framed(chance: random.Random, body: bytes) -> tuple[bytes, bytes | None]:
    """The body as sent, and the header that says how."""
    if not body and chance.random() < 0.5:
        return b"", None
    if chance.random() < 0.5:
        zeros = b"0" * chance.randrange(0, 2) * 3
        return body, chance.choice((b"Content-Length: ", b"content-length:")) + zeros + b"%d" % len(body)
    chunks: list[bytes] = []
    position = 0
    while position < len(body):
        size = chance.choice((1, 2, 17, 1000, 70_000))
        piece = body[position : position + size]
        shown = b"%x" % len(piece)
        shown = shown.upper() if chance.random() < 0.3 else b"0" * chance.randrange(3) + shown
        extension = chance.choice((b"", b"", b"", b";a", b';a="b;c"', b";a=b"))
        chunks += (shown, extension, b"\r\n", piece, b"\r\n")
        position += size
    trailers = chance.choice((b"", b"", b"x-t: 1\r\n", b"x-id: other\r\nHost: other\r\n"))
    return b"".join(chunks) + b"0\r\n" + trailers + b"\r\n", chance.choice(
        (b"Transfer-Encoding: chunked", b"transfer-encoding:Chunked")
    )
