"""Header bytes: status lines, hop-by-hop names, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from http import HTTPStatus

Header = tuple[bytes, bytes]

# RFC 9110 section 7.6.1, with the names that older software still sends. Only meaningful between two neighbours.
HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    )
)

# What a recipient needs before the body, or could be misled by behind it (RFC 9110 section 6.5.1).
_NEVER_TRAILERS = HOP_BY_HOP | {
    b"authorization",
    b"cache-control",
    b"content-encoding",
    b"content-length",
    b"content-range",
    b"content-type",
    b"cookie",
    b"expect",
    b"host",
    b"max-forwards",
    b"range",
    b"set-cookie",
    b"trailer",
    b"www-authenticate",
}

CRLF = b"\r\n"
BODYLESS_STATUS = frozenset((204, 304))


@cache
def status_line(status: int) -> bytes:
    """`HTTP/1.1 200 OK` with its line end; a status without a registered phrase gets an empty one."""
    assert 100 <= status <= 999, status
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return b"HTTP/1.1 %d %s\r\n" % (status, phrase.encode("latin-1"))


def append_headers(parts: list[bytes], headers: Sequence[Header]) -> None:
    """Add header lines to `parts` without joining them yet."""
    for name, value in headers:
        parts += (name, b": ", value, CRLF)


def find(headers: Sequence[Header], lowercase_name: bytes) -> bytes | None:
    """The first value under this name, or None."""
    for name, value in headers:
        if len(name) == len(lowercase_name) and name.lower() == lowercase_name:
            return value
    return None


def named_by_connection(headers: Sequence[Header]) -> frozenset[bytes]:
    """Names that a `Connection` header declares hop-by-hop for this message."""
    named: set[bytes] = set()
    for name, value in headers:
        if len(name) == 10 and name.lower() == b"connection":
            named.update(token.strip().lower() for token in value.split(b","))
    return frozenset(named)


def end_to_end(headers: Sequence[Header]) -> list[Header]:
    """The headers that may be forwarded, in their order and spelling."""
    named = named_by_connection(headers)
    if named:
        hidden = HOP_BY_HOP | named
        return [header for header in headers if header[0].lower() not in hidden]
    return [header for header in headers if header[0].lower() not in HOP_BY_HOP]


def last_chunk(trailers: Sequence[Header]) -> bytes:
    """The end of a chunked body, with those of the trailers that may be there."""
    parts = [b"0\r\n"]
    append_headers(parts, [header for header in trailers if header[0].lower() not in _NEVER_TRAILERS])
    parts.append(CRLF)
    return b"".join(parts)


def chunk(data: bytes) -> bytes:
    """One piece of a chunked body; not for empty ones, which would end it."""
    return b"%x\r\n%b\r\n" % (len(data), data)
