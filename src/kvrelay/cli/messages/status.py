"""The four numbers in one line."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.edge.observe.explain import printable
from kvrelay.edge.observe.runbook import told
from kvrelay.edge.observe.windows import FourNumbers


def one_line(numbers: FourNumbers, *, workers: int, down: Sequence[str]) -> str:
    fleet = f"workers: {workers - len(down)} of {workers} up" + (f" ({', '.join(down)} down)" if down else "")
    return printable(" | ".join((*told(numbers), fleet)))
