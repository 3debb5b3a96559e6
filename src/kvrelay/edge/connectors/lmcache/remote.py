"""Addresses of LMCache's remote backends, as addresses of our stores."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

_S3_HOST = re.compile(r"^(?P<bucket>.+?)\.s3[.-](?P<region>[a-z0-9-]+)\.amazonaws\.com$")
_KNOWN = "redis://, valkey://, fs://, s3://, mooncakestore://"


class RemoteRefused(ValueError):
    """This backend has no counterpart here; the text says what to do instead."""


def store_url(remote_url: str) -> str:
    """Raises RemoteRefused."""
    parts = urlsplit(remote_url)
    if parts.password or parts.username:
        raise RemoteRefused("it carries a password, which would show up in logs; put it into a file, `?password_file=`")
    match parts.scheme:
        case "redis" | "rediss" | "valkey" | "valkeys":
            scheme = parts.scheme.replace("redis", "valkey")
            return f"{scheme}://{parts.netloc}/{parts.path.strip('/') or 0}"
        case "fs":
            if not parts.path.startswith("/"):
                raise RemoteRefused("fs:// names no absolute path; as in fs://host:0/mnt/kv")
            return f"file://{parts.path}"
        case "s3":
            return _s3(parts.netloc, parts.path)
        case "mooncakestore" | "mooncake":
            return f"mooncake://{parts.netloc}"
        case "lm":
            raise RemoteRefused(
                f"the protocol of LMCache's own server is not spoken here; run `kvrelay store serve` in its place and "
                f"name it as peer://{parts.netloc}"
            )
        case _:
            raise RemoteRefused(f"`{parts.scheme}://` has no counterpart here; known: {_KNOWN}")


def _s3(host: str, path: str) -> str:
    prefix = path.strip("/") or "kvrelay"
    amazon = _S3_HOST.match(host)
    if amazon is not None:
        return f"s3://{amazon['bucket']}/{prefix}?region={amazon['region']}"
    if not host or ":" in host:
        raise RemoteRefused("s3:// names no bucket; as in s3://BUCKET/PREFIX?endpoint=URL")
    return f"s3://{host}/{prefix}"
