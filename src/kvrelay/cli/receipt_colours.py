"""Receipts in colour, for terminals that want it (`NO_COLOR` and pipes do not); the words are the same without."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

_MARKS = (  # how a line begins, once stripped -> its style
    ("Request ", "bold"),
    ("-> ", "green"),
    ("Policy ", "cyan"),
    ("The index claimed", "yellow"),
    ("Hit according", "green"),
    ("Tokens that could be hit and were not", "yellow"),
    ("It failed", "red"),
    ("Its stream broke", "red"),
    ("Incarnation", "dim"),
    ("Manifest", "dim"),
)


def printer(console: Console | None = None) -> Callable[[Text], None]:
    """Writes lines to stdout as wide as they are: in colour to a terminal, plain to everything else."""
    console = console or Console(file=sys.stdout, highlight=False, markup=False, emoji=False)

    def write(line: Text) -> None:
        if console.is_terminal and console.color_system is not None:
            console.print(line, soft_wrap=True)
        else:
            console.file.write(line.plain + "\n")
        console.file.flush()

    return write


def told(text: str) -> Text:
    """An explanation, line by line."""
    whole = Text("\n").join(Text(line, style=_style(line)) for line in text.split("\n"))
    whole.highlight_regex(r"failed: \w+|\(the terms sum to .*\)", style="bold red")
    return whole


def listed(line: str, status: str) -> Text:
    """One line of a list, with its status in its colour."""
    text = Text(line)
    text.highlight_words([f"  {status}  "], style="green" if status == "ok" else "bold red")
    return text


def _style(line: str) -> str:
    stripped = line.strip()
    return next((style for begin, style in _MARKS if stripped.startswith(begin)), "")
