"""What one client connection may cost us. Every bound is a number here, and reaching it has an answer."""

from __future__ import annotations

from msgspec import Struct


class HttpLimits(Struct, frozen=True):
    """Bounds of one listener; the comments name the answer that a client gets."""

    header_bytes: int = 64 * 1024  # 431
    body_bytes: int = 256 * 1024 * 1024  # 413, for a body that is read whole
    streamed_body_bytes: int = 256 * 1024 * 1024  # 413, for one that is passed on as it comes
    head_timeout_s: float = 30.0  # 408: from the first byte of a request to the end of its header
    body_timeout_s: float = 60.0  # 408: without one byte of progress inside a body
    idle_timeout_s: float = 300.0  # closed silently between requests
    linger_s: float = 2.0  # how long the last answer may take to leave before the connection is cut
    discard_s: float = 30.0  # how long a body that nobody wants any more is read and thrown away
    pipelined_requests: int = 16  # reading stops until these are answered
    write_buffer_bytes: int = 256 * 1024  # above it `Exchange.on_flow(False)`
