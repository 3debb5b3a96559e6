"""All wording that people see on the command line: what was received, what is legal, the one next thing to try."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable
from typing import NoReturn

OK, VERDICT_FAIL, USAGE_ERROR, UNKNOWN = 0, 1, 2, 3
"""Exit codes, the same for every command."""


def fail(message: str, code: int = USAGE_ERROR) -> NoReturn:
    """Print `message` on stderr and end the process with `code`."""
    sys.stderr.write(message.rstrip("\n") + "\n")
    raise SystemExit(code)


def unknown_name(kind: str, received: str, legal: Iterable[str], *, source: str) -> str:
    """`unknown KIND` with the legal names and the nearest one."""
    names = sorted(legal)
    lines = [f"error: unknown {kind} `{received}` (from {source})"]
    lines.append(f"  known {_plural(kind)}: " + ", ".join(f"`{name}`" for name in names))
    nearest = difflib.get_close_matches(received, names, n=1, cutoff=0.5)
    if nearest:
        lines.append(f"hint: did you mean `{nearest[0]}`?")
    return "\n".join(lines)


def bad_value(name: str, received: object, legal: str, *, source: str) -> str:
    """A value out of its legal range."""
    return f"error: `{name}` is `{received}` (from {source})\n  legal: {legal}"


def _plural(noun: str) -> str:
    return noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
