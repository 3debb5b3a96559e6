"""What the script languages of all fault proxies have in common: durations, numbers, and how a mistake is told."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

MAX_DELAY_S = 3600.0
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0}


class ScriptError(ValueError):
    """An instruction that is not legal; the text says what would be."""


def parts(text: str) -> list[tuple[int, str, list[str]]]:
    """The instructions of a script: number of the line, the text, its words. `;` separates, `#` begins a comment."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        for part in line.partition("#")[0].split(";"):
            if words := part.split():
                found.append((number, part.strip(), words))
    return found


def duration_s(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m)", text)
    if found is None:
        raise ScriptError(f"`{text}` is no duration; legal: 500ms, 2s, 1.5s, 1m")
    seconds = float(found[1]) * _UNITS_S[found[2]]
    if seconds > MAX_DELAY_S:
        raise ScriptError(f"`{text}` is longer than an hour")
    return seconds


def number(text: str, smallest: int, largest: int) -> int:
    if not text.isdigit() or not smallest <= int(text) <= largest:
        raise ScriptError(f"`{text}` is not legal here; legal: a whole number from {smallest} to {largest}")
    return int(text)


def not_legal(word: str, forms: Mapping[str, str]) -> str:
    """`forms` has what may follow each word that an instruction can begin with."""
    if word in forms:
        return f"legal: {forms[word]}"
    nearest = difflib.get_close_matches(word, forms, n=1, cutoff=0.5)
    hint = f"; did you mean `{nearest[0]}`?" if nearest else ""
    return f"unknown instruction `{word}`; known: {', '.join(forms)}{hint}"
