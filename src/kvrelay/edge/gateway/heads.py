"""The heads of a proxied request, both ways: what the gateway reads of them, drops, and adds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from msgspec import Struct

from kvrelay.core.model.effects import Dispatch
from kvrelay.edge.connectors.base import Connector
from kvrelay.edge.fleet.view import Upstream
from kvrelay.edge.http.client import Origin
from kvrelay.edge.http.heads import CRLF, HOP_BY_HOP, Header, end_to_end
from kvrelay.edge.system.urls import host_and_port

_CREDENTIALS = frozenset((b"authorization", b"x-api-key"))
# Made anew for the worker, or meant for us alone.
_FOR_US = frozenset((b"x-kvrelay-priority", b"x-kvrelay-deadline-ms"))
_NOT_FORWARDED = HOP_BY_HOP | _CREDENTIALS | _FOR_US | {b"host", b"content-length", b"expect"}
_DIGESTS = frozenset((b"content-digest", b"repr-digest", b"digest", b"content-md5", b"signature"))
_HARMLESS_CONNECTION = frozenset((b"keep-alive", b"close", b""))
_OURS = frozenset(
    (
        b"x-kvrelay-request-id",
        b"x-kvrelay-worker",
        b"x-kvrelay-route-reason",
        b"x-kvrelay-matched-tokens",
        b"x-kvrelay-reason",
    )
)
_NOT_PASSED = HOP_BY_HOP | _OURS
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:@/+=-]{1,128}\Z")
_POSITIVE = re.compile(rb" *[0-9]{1,9}(?:\.[0-9]{1,6})? *\Z")
_SESSION_ID = re.compile(rb"[\x21-\x7e]{1,256}\Z")
SECOND_SESSION_HEADER = b"x-dynamo-session-id"


class RequestHead(Struct):
    """One pass over the client's headers. `forwarded` is ready to be joined into the worker's request."""

    forwarded: list[bytes]
    authorization: bytes | None = None
    api_key: bytes | None = None  # how clients of Anthropic's API bring it
    request_id: str | None = None
    names_itself: bool = False  # has an id of its own, though not one that we could use as ours
    session_id: str | None = None
    priority: int = 0
    deadline_ms: float | None = None
    complaint: str | None = None  # what the client must mend
    encoded_body: bool = False  # compressed: no member of it can be read
    sealed_body: bool = False  # a digest of it is in the head: it must arrive as it was sent
    takes_trailers: bool = False  # says that it wants those of the answer


def read_head(headers: Sequence[Header], session_header: bytes) -> RequestHead:
    """`session_header` in lower case; it goes over the other session header when both are there."""
    head = RequestHead([])
    second_session: bytes | None = None
    parts = head.forwarded
    for name, value in headers:
        lowered = name.lower()
        if lowered in _NOT_FORWARDED:
            if lowered == b"authorization":
                head.authorization = value
            elif lowered == b"x-api-key":
                head.api_key = value
            elif lowered == b"x-kvrelay-priority":
                head.priority = _priority(value)
            elif lowered == b"x-kvrelay-deadline-ms":
                head.deadline_ms = _milliseconds(value)
                if head.deadline_ms is None:
                    shown = value[:40].decode("latin-1")
                    head.complaint = f"x-kvrelay-deadline-ms must be milliseconds above 0, such as 1500; got `{shown}`"
            elif lowered == b"te":
                head.takes_trailers = _accepts_trailers(value)
            elif lowered == b"connection" and value.strip().lower() not in _HARMLESS_CONNECTION:
                return _read_with_named_hops(headers, session_header)
            continue
        if lowered == session_header:
            head.session_id = _word(_SESSION_ID, value)
        elif lowered == SECOND_SESSION_HEADER:
            second_session = value
        elif lowered == b"x-request-id":
            head.request_id = _word(_REQUEST_ID, value)
            head.names_itself = True
        elif lowered == b"content-encoding":
            head.encoded_body = value.strip().lower() != b"identity"
        elif lowered in _DIGESTS:
            head.sealed_body = True
        parts += (name, b": ", value, CRLF)
    if head.session_id is None and second_session is not None:
        head.session_id = _word(_SESSION_ID, second_session)
    return head


def _read_with_named_hops(headers: Sequence[Header], session_header: bytes) -> RequestHead:
    """`Connection` names further headers that end here; rare, so it may take a second pass."""
    head = read_head(_keeping_ours(headers), session_header)
    head.takes_trailers = any(_accepts_trailers(value) for name, value in headers if name.lower() == b"te")
    return head


def _accepts_trailers(value: bytes) -> bool:
    return any(coding.strip().lower() == b"trailers" for coding in value.split(b","))


def _keeping_ours(headers: Sequence[Header]) -> list[Header]:
    """Our credential check must not be switched off by naming the credential in `Connection`."""
    credentials = [header for header in headers if header[0].lower() in _CREDENTIALS]
    rest = [header for header in end_to_end(headers) if header[0].lower() not in _CREDENTIALS]
    return credentials + rest


class Learned(Struct):
    """What a worker's answers taught us, for as long as it stays the same worker."""

    counts_unasked: bool = True  # False: it refuses `include_usage`, or its streams cannot be edited


class Route(Struct, frozen=True):
    """A worker, prepared for the request path. Holds its key: never log it."""

    upstream: Upstream
    origin: Origin
    base_path: bytes
    host_line: bytes
    authorization_line: bytes | None
    worker_header: Header
    connector: Connector
    learned: Learned
    kv_report: Origin | None = None


def make_route(name: str, upstream: Upstream) -> Route:
    host, port = host_and_port(upstream.url)
    parts = urlsplit(upstream.url)
    key = {header.lower(): value for header, value in upstream.headers.items()}.get("authorization")
    return Route(
        upstream=upstream,
        origin=Origin(host, port, tls=upstream.tls),
        base_path=parts.path.encode("latin-1"),
        host_line=b" HTTP/1.1\r\nhost: " + parts.netloc.encode("latin-1") + CRLF,
        authorization_line=None if key is None else b"authorization: " + key.encode("latin-1") + CRLF,
        worker_header=(b"x-kvrelay-worker", name.encode("latin-1")),
        connector=upstream.connector,
        learned=Learned(counts_unasked=upstream.connector.counts_streams),
        kv_report=None if upstream.kv_report is None else Origin(*host_and_port(upstream.kv_report)),
    )


def worker_request(
    route: Route,
    *,
    method: str,
    target: str,
    forwarded: Sequence[bytes],
    extra: bytes,
    body: bytes,
    framing: bytes | None = None,
) -> bytes:
    """The whole request as the worker gets it. `extra` has complete header lines of ours.

    `framing` is the header line that says how long the body is, if that is not simply the length of `body`.
    """
    length = framing or b""
    if framing is None and (body or method in ("POST", "PUT", "PATCH")):
        length = b"content-length: %d\r\n" % len(body)
    return b"".join(
        (
            method.encode("latin-1"),
            b" ",
            route.base_path,
            target.encode("latin-1"),
            route.host_line,
            *forwarded,
            extra,
            length,
            CRLF,
            body,
        )
    )


def client_headers(
    status: int, headers: Sequence[Header], request_id: bytes, dispatch: Dispatch, route: Route
) -> list[Header]:
    """The worker's headers that may pass, and ours behind them. An error tells nothing of what its worker holds: who
    has no key for the worker would learn from it which prompts others sent."""
    passed = _passed(headers)
    passed += (
        (b"x-kvrelay-request-id", request_id),
        route.worker_header,
        (b"x-kvrelay-route-reason", dispatch.reason.encode("latin-1")),
    )
    if dispatch.matched_tokens is not None and status < 400:
        passed.append((b"x-kvrelay-matched-tokens", b"%d" % dispatch.matched_tokens))
    return passed


def _passed(headers: Sequence[Header]) -> list[Header]:
    passed: list[Header] = []
    for header in headers:
        lowered = header[0].lower()
        if lowered not in _NOT_PASSED:
            passed.append(header)
        elif lowered == b"connection" and header[1].strip().lower() not in _HARMLESS_CONNECTION:
            return _passed(end_to_end(headers))
    return passed


def retry_after_s(headers: Sequence[Header]) -> float | None:
    """Only the form in seconds; a date says nothing that we could use."""
    for name, value in headers:
        if len(name) == 11 and name.lower() == b"retry-after" and value.strip().isdigit():
            return float(value)
    return None


def is_event_stream(headers: Sequence[Header]) -> bool:
    for name, value in headers:
        if len(name) == 12 and name.lower() == b"content-type":
            return value.lower().startswith(b"text/event-stream")
    return False


def _priority(value: bytes) -> int:
    try:
        return max(-1000, min(1000, int(value)))
    except ValueError:
        return 0


def _milliseconds(value: bytes) -> float | None:
    return float(value) if _POSITIVE.match(value) and float(value) > 0 else None


def _word(pattern: re.Pattern[bytes], value: bytes) -> str | None:
    value = value.strip()
    return value.decode("ascii") if pattern.match(value) else None
