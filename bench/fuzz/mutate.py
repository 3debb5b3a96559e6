"""Bytes made wrong: at random, and in the ways in which neighbours are known to disagree about where a message ends."""

from __future__ import annotations

import random

TOKENS = (
    b"\r",
    b"\n",
    b"\r\n",
    b"\r\n\r\n",
    b"\0",
    b" ",
    b"\t",
    b":",
    b",",
    b"0",
    b"-1",
    b"+5",
    b"0x5",
    b"99999999999999999999",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n",
    b"Content-Length: 5\r\n",
    b"Content-Length: 0\r\n",
    b"Host: y\r\n",
    b"Connection: close\r\n",
    b"Expect: 100-continue\r\n",
    b"Upgrade: websocket\r\nConnection: upgrade\r\n",
    b" HTTP/1.0",
    b" HTTP/2.0",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00",
    b"\xff\xfe",
    b"\xc0\x80",
    b"A" * 300,
    b"A" * 20_000,
    b"a: b\r\n" * 400,
    b"\r\n continued",
    b"0\r\n\r\n",
    b"fffffffffffffff1\r\n",
)


SWAPS = ((b"\r\n", b"\n"), (b"\r\n", b"\r"), (b": ", b":"), (b" ", b"\t"), (b"1", b"7"))


def mutated(chance: random.Random, data: bytes, *, within: int | None = None) -> bytes:
    """One to four changes, most of them among the first `within` bytes (a head), where they matter."""
    for _ in range(chance.choice((1, 1, 1, 2, 3, 4))):
        data = _changed(chance, data, len(data) if within is None or chance.random() < 0.2 else min(within, len(data)))
    return data


def _changed(chance: random.Random, data: bytes, limit: int) -> bytes:
    start = chance.randrange(limit + 1)
    end = min(len(data), start + chance.choice((1, 1, 2, 5, 30)))
    match chance.randrange(8):
        case 0:
            return data[:start] + data[end:]
        case 1:
            return data[:end] + data[start:]
        case 2:
            return data[:start] + bytes(byte ^ (1 << chance.randrange(8)) for byte in data[start:end]) + data[end:]
        case 3:
            return data[:start] + chance.randbytes(end - start) + data[end:]
        case 4:
            found, other = chance.choice(SWAPS)
            return data.replace(found, other, chance.choice((1, 2, -1)))
        case 5:
            return data[:start]
        case _:
            return data[:start] + chance.choice(TOKENS) + data[start:]


# What stands before, between and after the two lengths of a request whose body hides another one. The gateway must
# refuse each or read it as one request: the hidden one must reach no worker.
SMUGGLING_HEADS = (
    b"Content-Length: %(all)d\r\nTransfer-Encoding: chunked",
    b"Transfer-Encoding: chunked\r\nContent-Length: %(all)d",
    b"Content-Length: 0\r\nTransfer-Encoding: chunked",
    b"Content-Length: %(all)d\r\nContent-Length: 0",
    b"Content-Length: 0\r\nContent-Length: %(all)d",
    b"Content-Length: 0, %(all)d",
    b"Content-Length: +%(all)d",
    b"Content-Length: 0x%(all)x",
    b"Content-Length:\r\n %(all)d",
    b"Content-Length : %(all)d",
    b"Content-Length: %(all)d ",
    b"Content-Length\t: %(all)d",
    b"content-length: %(all)d\r\ntransfer-encoding: identity",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
    b"Transfer-Encoding: identity, chunked",
    b"Transfer-Encoding: chunked, identity",
    b"Transfer-Encoding: xchunked",
    b"Transfer-Encoding: \x0bchunked",
    b"Transfer-Encoding\x0b: chunked",
    b"Transfer-Encoding : chunked",
    b" Transfer-Encoding: chunked",
    b"X: y\r\n Transfer-Encoding: chunked",
    b"X: y\rTransfer-Encoding: chunked",
    b"X: y\nTransfer-Encoding: chunked",
    b"Transfer-Encoding:\tchunked",
    b'Transfer-Encoding: "chunked"',
    b"Transfer-Encoding: chunked;q=1",
    b"Transfer_Encoding: chunked",
    b"Content-Length: %(all)d\r\nConnection: Content-Length",
    b"Content-Length: %(all)d\r\nConnection: close, Content-Length",
    b"Transfer-Encoding: chunked\r\nConnection: Transfer-Encoding",
    b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMA\r\nContent-Length: %(all)d",
    b"Upgrade: websocket\r\nConnection: Upgrade\r\nContent-Length: %(all)d",
    b"Upgrade: websocket\r\nConnection: Upgrade\r\nTransfer-Encoding: chunked",
    b"Expect: 100-continue\r\nContent-Length: %(all)d",
    b"Expect: 100-continue\r\nExpect: x\r\nContent-Length: %(all)d",
)
SMUGGLING_BODIES = (
    b"%(hidden)b",
    b"0\r\n\r\n%(hidden)b",
    b"%(size)x\r\n%(hidden)b\r\n0\r\n\r\n",
    b"%(size)x;\n%(hidden)b\r\n0\r\n\r\n",
    b"%(size)x\n%(hidden)b\n0\n\n",
    b"%(size)x;a=\x00\r\n%(hidden)b\r\n0\r\n\r\n",
    b"-%(size)x\r\n%(hidden)b\r\n0\r\n\r\n",
    b"0%(size)x \r\n%(hidden)b\r\n0\r\n\r\n",
    b"10000000000000000\r\n%(hidden)b\r\n0\r\n\r\n",
    b"1\r\nA0\r\n\r\n%(hidden)b",
    b"0\r\nx: y\n\n%(hidden)b\r\n\r\n",
    b"0;%(hidden)b\r\n\r\n",
)


def smuggling(chance: random.Random, hidden: bytes, open_request: bytes) -> bytes:
    """A request whose body hides another one.

    Where the body ends before that, by the one length that there is, it is pipelining: `open_request` stands there.
    """
    head, body = chance.choice(SMUGGLING_HEADS), chance.choice(SMUGGLING_BODIES)
    unframed = b"ontent-" not in head and b"ransfer-" not in head
    chunked = b"ransfer-" in head and body.startswith(b"0\r\n\r\n")
    within = open_request if unframed or chunked else hidden
    raw = body % {b"hidden": within, b"size": len(within)}
    lines = head % {b"all": len(raw)}
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nx-id: outer\r\n%b\r\n\r\n%b" % (lines, raw)
