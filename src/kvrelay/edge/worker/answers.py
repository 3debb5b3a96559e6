"""The JSON shapes of the mock's answers, and what marks them as a mock's."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec

from kvrelay.edge.http.heads import Header
from kvrelay.edge.http.server import Exchange

MOCK_HEADER: Header = (b"x-kvrelay-mock", b"1")
JSON_HEADERS: tuple[Header, ...] = ((b"content-type", b"application/json"), MOCK_HEADER)
TEXT_HEADERS: tuple[Header, ...] = ((b"content-type", b"text/plain; version=0.0.4; charset=utf-8"), MOCK_HEADER)
STREAM_HEADERS: tuple[Header, ...] = ((b"content-type", b"text/event-stream; charset=utf-8"), MOCK_HEADER)
STREAM_END = b"data: [DONE]\n\n"
MESSAGES_PATH = "/v1/messages"

_ERROR_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class RequestError(Exception):
    """The request cannot be served; answered with its status in the engine's error shape."""

    def __init__(self, status: int, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param


def mock_mark(incarnation: str, wrong_reuse_blocks: int) -> dict[str, Any]:
    """The member `kvrelay_mock` of every answer body."""
    return {
        "mock": True,
        "models_payload": False,
        "incarnation": incarnation,
        "wrong_reuse_blocks": wrong_reuse_blocks,
    }


def usage(*, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def error_body(status: int, message: str, *, param: str | None = None) -> bytes:
    return msgspec.json.encode(
        {"error": {"message": message, "type": _error_type(status), "param": param, "code": status}}
    )


def _messages_error_body(status: int, message: str) -> bytes:
    """The shape of Anthropic's API, with the engine's names."""
    return msgspec.json.encode({"type": "error", "error": {"type": _error_type(status), "message": message}})


def _error_type(status: int) -> str:
    return _ERROR_TYPES.get(status) or HTTPStatus(status).phrase


def respond_json(exchange: Exchange, body: Mapping[str, Any] | list[Any], *, status: int = 200) -> None:
    exchange.respond(status, JSON_HEADERS, msgspec.json.encode(body))


def respond_error(exchange: Exchange, error: RequestError, headers: tuple[Header, ...] = ()) -> None:
    if exchange.path.startswith(MESSAGES_PATH):
        body = _messages_error_body(error.status, error.message)
    else:
        body = error_body(error.status, error.message, param=error.param)
    exchange.respond(error.status, (*JSON_HEADERS, *headers), body)


def sse(body: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def named_sse(event: str, body: Mapping[str, Any]) -> bytes:
    return b"event: " + event.encode() + b"\ndata: " + msgspec.json.encode(body) + b"\n\n"
