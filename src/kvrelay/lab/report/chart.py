"""What the page draws: rows of plain values for a drawing function, and the same numbers as a table below it."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from kvrelay.lab.report.table import Table


class Chart(Struct, frozen=True):
    """`kind` names the drawing function in `page.js`."""

    kind: str
    title: str
    reading: str  # how to read it, one sentence or two
    rows: tuple[dict[str, Any], ...]
    table: Table
    wide: bool = False
