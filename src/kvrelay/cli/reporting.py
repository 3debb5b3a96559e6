"""What commands that report a verdict have in common: its exit code, and JSON on stdout."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from kvrelay.cli import messages

EXIT_OF_VERDICT: Mapping[str, int] = {
    "pass": messages.OK,
    "fail": messages.VERDICT_FAIL,
    "unknown": messages.UNKNOWN,
}


def print_json(value: Any) -> None:
    """Structs, enums and plain values alike, two spaces per level."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value)).decode() + "\n")
