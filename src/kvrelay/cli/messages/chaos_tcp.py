"""What `kvrelay chaos tcp` says."""

from __future__ import annotations


def listening(address: str, upstream: str, control: str | None) -> str:
    orders = "standard input" if control is None else f"standard input and POST {control}"
    return f"kvrelay chaos tcp: {address} -> {upstream}; instructions from {orders}"


def cannot_listen(address: str, reason: str) -> str:
    return f"error: cannot listen on {address}: {reason}\nhint: port 0 takes a free one"
