"""What `kvrelay checklist` says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from textwrap import wrap

from kvrelay.core.checklist.item import Checked

WORDS = {"pass": "pass", "fail": "FAIL", "unknown": "unknown"}
RED_WORDS = {"pass": "clear", "fail": "RED", "unknown": "unknown"}
TITLES = {
    "beginner": "Before a complex policy goes live",
    "prelaunch": "Before the launch",
    "postlaunch": "After the launch",
    "redflags": "Red flags",
}
_INDENT = " " * 10


def looking(places: Sequence[object], workers: int, router: str | None, *, touches: bool) -> str:
    whom = f"{workers} worker{'' if workers == 1 else 's'}" + ("" if router is None else f", the gateway at {router}")
    how = "tiers and workers get small probes (`--no-probe`: none)" if touches else "nothing is sent (`--no-probe`)"
    return f"evidence below {', '.join(f'`{place}`' for place in places)}; {whom}; {how}"


def unread(complaints: Sequence[str]) -> str:
    return "\n".join(f"warning: not read as evidence: {complaint}" for complaint in complaints)


def no_place(path: object) -> str:
    return (
        f"error: `{path}` (from `--evidence`) does not exist\n"
        "  legal: a folder with runs, replays in blocks and drills, or a file of `kvrelay drill run --json`\n"
        "hint: kvrelay replay TRACE --out DIR and kvrelay drill run all --out DIR leave evidence"
    )


def lines(stage: str, checked: Sequence[Checked], *, width: int) -> list[tuple[str, str]]:
    """(verdict or empty, line): the first line of an item carries its verdict, so that it can be coloured."""
    words = RED_WORDS if stage == "redflags" else WORDS
    shown = [("", TITLES[stage])]
    for number, one in enumerate(checked, 1):
        head, *rest = wrap(f"{number}. {one.asks}", max(width - 10, 40))
        shown.append((one.verdict.value, f"{words[one.verdict.value]:8}  {head}"))
        shown += [("", f"{_INDENT}{line}") for line in rest]
        for said in one.parts or (one.reason,):
            first, *more = wrap(said, max(width - 12, 40))
            shown += [("", f"{_INDENT}- {first}"), *(("", f"{_INDENT}  {line}") for line in more)]
        shown += [("", f"{_INDENT}evidence: {where}") for where in one.evidence]
        if one.todo is not None:
            shown += [("", f"{_INDENT}{line}") for line in wrap(f"to do: {one.todo}", max(width - 10, 40))]
    return [*shown, ("", "")]


def verdict(outcome: str, checked: Sequence[Checked]) -> str:
    counts = Counter(one.verdict.value for one in checked)
    return f"verdict: {outcome} (" + ", ".join(f"{counts[name]} {name}" for name in WORDS if counts[name]) + ")"
