"""Reading receipt files: line by line, with a bad line named rather than skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from kvrelay.core.receipts.receipt import Receipt

_decode = msgspec.json.Decoder(Receipt).decode


class BadReceipt(ValueError):
    """A line is not a receipt; the message says which line and why."""


def read_receipts(path: Path) -> Iterator[Receipt]:
    """All receipts of a file, oldest first. Raises OSError or BadReceipt."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield parse_receipt(line, f"{path}:{number}")


def parse_receipt(line: bytes, where: str) -> Receipt:
    try:
        return _decode(line)
    except msgspec.DecodeError as error:
        raise BadReceipt(f"{where}: {error}") from error


def receipt_schema() -> dict[str, Any]:
    """JSON schema of one receipt line; closed, since a member that it does not name could hold anything."""
    schema = msgspec.json.schema(Receipt)
    for definition in schema["$defs"].values():
        if definition.get("type") == "object":
            definition["additionalProperties"] = False
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "kvrelay receipt", **schema}
