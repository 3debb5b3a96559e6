"""/v1/audio/transcriptions: nothing is heard; the answer says what arrived, for who wants to know whether it did."""

from __future__ import annotations

import re
from hashlib import blake2b

from msgspec import Struct

from kvrelay.edge.http.server import Exchange
from kvrelay.edge.worker import answers
from kvrelay.edge.worker.answers import RequestError
from kvrelay.edge.worker.generation import adapter_of
from kvrelay.edge.worker.spec import MockSpec

_BOUNDARY = re.compile(rb'boundary="?([^";\s]{1,70})"?', re.IGNORECASE)
_NAME = re.compile(rb'[;\s]name="([^"]*)"', re.IGNORECASE)
_FILE_NAME = re.compile(rb'[;\s]filename="([^"]*)"', re.IGNORECASE)


class _Field(Struct):
    """One part of a form; `file_name` where it is a file."""

    name: str
    value: bytes
    file_name: str | None


def transcribe(exchange: Exchange, spec: MockSpec) -> None:
    """`sizes: NAME BYTES DIGEST` of the file, and the other fields as they came."""
    fields = {field.name: field for field in _read_form(exchange)}
    file = fields.pop("file", None)
    if file is None or file.file_name is None:
        raise RequestError(400, "a form with a `file` is needed", param="file")
    said = {name: field.value.decode("utf-8", "replace") for name, field in fields.items()}
    adapter_of(said.get("model"), spec)
    digest = blake2b(file.value, digest_size=8).hexdigest()
    text = f"{file.file_name}: {len(file.value)} bytes, digest {digest}"
    if said.get("response_format") == "text":
        exchange.respond(200, answers.TEXT_HEADERS, text.encode())
    else:
        answers.respond_json(exchange, {"text": text, "fields": said})


def _read_form(exchange: Exchange) -> list[_Field]:
    kind = exchange.header(b"content-type") or b""
    boundary = _BOUNDARY.search(kind)
    if not kind.lower().startswith(b"multipart/form-data") or boundary is None:
        raise RequestError(400, "Unsupported Media Type: Only 'multipart/form-data' with a boundary is allowed")
    mark = b"--" + boundary[1]
    preamble, *parts = (b"\r\n" + exchange.body).split(b"\r\n" + mark)
    if preamble.strip() or not parts or not parts[-1].startswith(b"--"):
        raise RequestError(400, "the form has no end")
    return [_field(part.removeprefix(b"\r\n")) for part in parts[:-1]]


def _field(part: bytes) -> _Field:
    head, empty_line, value = part.partition(b"\r\n\r\n")
    name = _NAME.search(head)
    if name is None or not empty_line:
        raise RequestError(400, "a part of the form has no name")
    file_name = _FILE_NAME.search(head)
    return _Field(
        name[1].decode("utf-8", "replace"),
        value,
        None if file_name is None else file_name[1].decode("utf-8", "replace"),
    )
