"""The admin port of a running gateway, for commands that only ask."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvrelay.core.receipts.receipt import Receipt

TIMEOUT_S = 10.0


class AdminUnavailable(Exception):
    """The gateway did not answer, or not what a gateway answers."""


class _Receipts(msgspec.Struct):
    receipts: list[Receipt]


class AdminClient:
    def __init__(self, url: str, token_file: Path | None = None) -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        self._token_file = token_file

    def receipts(self, limit: int) -> list[Receipt]:
        """The last receipts, newest first."""
        path = f"/admin/receipts?limit={limit}"
        body = self._get(path)
        if body is None:
            raise AdminUnavailable(
                f"{self.url}{path} answered 404: that is no admin port of a gateway (8001 unless set otherwise)"
            )
        try:
            return msgspec.json.decode(body, type=_Receipts).receipts
        except msgspec.DecodeError as error:
            raise AdminUnavailable(f"{self.url}{path} answered something else: {error}") from error

    def metrics(self) -> str:
        """The metrics page."""
        body = self._get("/metrics")
        if body is None:
            raise AdminUnavailable(f"{self.url}/metrics answered 404: that is no admin port of a gateway")
        return body.decode("utf-8", "replace")

    def receipt(self, request_id: str) -> Receipt | None:
        path = f"/admin/receipts/{urllib.parse.quote(request_id, safe='')}"
        body = self._get(path)
        try:
            return None if body is None else msgspec.json.decode(body, type=Receipt)
        except msgspec.DecodeError as error:
            raise AdminUnavailable(f"{self.url}{path} answered something else: {error}") from error

    def workers(self) -> bytes:
        """All workers as the gateway describes them, in JSON."""
        body = self._get("/admin/workers")
        if body is None:
            raise AdminUnavailable(f"{self.url}/admin/workers answered 404: that is no admin port of a gateway")
        return body

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """The answer to an order. Raises AdminUnavailable for a refusal too, with what the gateway said."""
        request = self._request(path)
        request.method = method
        if body is not None:
            request.data = msgspec.json.encode(body)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                answer: bytes = response.read()
                return answer
        except urllib.error.HTTPError as error:
            said = error.read(2000).decode("utf-8", "replace")
            error.close()
            raise AdminUnavailable(f"{self.url}{path} answered {error.code}: {said}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise AdminUnavailable(f"{self.url}: {getattr(error, 'reason', error)}") from error

    def events(self, path: str) -> Iterator[bytes]:
        """The data of server-sent events, until the gateway ends or the caller stops. Raises AdminUnavailable."""
        try:
            with urllib.request.urlopen(self._request(path), timeout=TIMEOUT_S) as response:
                for line in response:
                    if line.startswith(b"data: "):
                        yield line[6:].rstrip(b"\n")
        except urllib.error.HTTPError as error:
            error.close()
            raise AdminUnavailable(f"{self.url}{path} answered {error.code}{_remedy(error.code)}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise AdminUnavailable(f"{self.url}: {getattr(error, 'reason', error)}") from error

    def _get(self, path: str) -> bytes | None:
        """None for 404."""
        try:
            with urllib.request.urlopen(self._request(path), timeout=TIMEOUT_S) as response:
                body: bytes = response.read()
                return body
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:
                return None
            raise AdminUnavailable(f"{self.url}{path} answered {error.code}{_remedy(error.code)}") from error
        except urllib.error.URLError as error:
            reason = error.reason.strerror if isinstance(error.reason, OSError) else error.reason
            raise AdminUnavailable(f"{self.url}: {reason or error.reason}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise AdminUnavailable(f"{self.url}: {error}") from error

    def _request(self, path: str) -> urllib.request.Request:
        headers = {}
        if self._token_file is not None:
            headers["authorization"] = f"Bearer {self._token_file.read_text(encoding='utf-8').strip()}"
        return urllib.request.Request(self.url + path, headers=headers)


def _remedy(status: int) -> str:
    return "; the file with its token is named by `--admin-token-file`" if status == 401 else ""
