"""Canonical worker URLs: two spellings of one worker compare equal, and a path is joined to them exactly once."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

DEFAULT_PORTS = {"http": 80, "https": 443}
_IPV6_FORM = "an IPv6 host stands in brackets, as in http://[::1]:8000"
_SCHEME = re.compile(r"^[a-zA-Z][a-zA-Z0-9+.-]*://")
_HOST_NAME = re.compile(r"^[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?$")


class BadUrl(ValueError):
    """The text is not the URL of a worker; the message says what would be."""


def canonical_worker_url(text: str) -> str:
    """`HTTP://Host:80/v1/` -> `http://host`: lower-case scheme and host, no default port, no trailing slash, no `/v1`.

    The base path `/v1` goes because every path that we ask for brings its own (`/v1/models`, `/health`): users paste
    the base URL of an OpenAI client here. Any other base path is kept.
    """
    text = text.strip()
    try:
        parts = urlsplit(text if _SCHEME.match(text) else f"http://{text}")
    except ValueError:
        raise BadUrl(_IPV6_FORM) from None
    scheme = parts.scheme.lower()
    if scheme not in DEFAULT_PORTS:
        raise BadUrl("a worker URL begins with http:// or https://")
    if parts.username is not None or parts.password is not None:
        raise BadUrl("no credentials in a worker URL; put the key in a file and name it in `api_key_file`")
    if parts.query or parts.fragment:
        raise BadUrl("a worker URL has no query and no fragment")
    host = _canonical_host(parts.hostname)
    port = _port(parts.netloc, scheme)
    path = re.sub(r"/{2,}", "/", parts.path).rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{scheme}://{host}{port}{path}"


def join_url(base: str, path: str) -> str:
    """`path` (which begins with a slash) under a canonical worker URL."""
    return base + path


def host_and_port(url: str) -> tuple[str, int]:
    """Of a canonical URL; an IPv6 host comes without brackets."""
    parts = urlsplit(url)
    assert parts.hostname is not None, url
    return parts.hostname, parts.port or DEFAULT_PORTS[parts.scheme]


def is_loopback(host: str) -> bool:
    """Whether this host name or address is this machine, seen from itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def name_from_url(url: str) -> str:
    """The name of a worker that was given none: its authority, and its base path with dashes."""
    parts = urlsplit(url)
    return parts.netloc + parts.path.replace("/", "-")


def mask_credentials(url: str) -> str:
    """The URL with any user, password and query values hidden."""
    masked = re.sub(r"(?<=://)[^/@]*@", "***@", url)
    return re.sub(r"(?<=[?&])([^=&]+)=[^&]*", r"\1=***", masked)


def _canonical_host(host: str | None) -> str:
    if not host:
        raise BadUrl("a worker URL names a host")
    if ":" in host:
        try:
            return f"[{ipaddress.IPv6Address(host)}]"
        except ValueError:
            raise BadUrl(_IPV6_FORM) from None
    host = host.lower().rstrip(".")
    if not _HOST_NAME.match(host):
        raise BadUrl("a host is a name or an address")
    return host


def _port(netloc: str, scheme: str) -> str:
    try:
        port = urlsplit(f"//{netloc}").port
    except ValueError:
        raise BadUrl("a port is a number from 1 to 65535") from None
    if port == 0:
        raise BadUrl("a port is a number from 1 to 65535")
    return "" if port in (None, DEFAULT_PORTS[scheme]) else f":{port}"
