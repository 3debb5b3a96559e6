"""Results of drills and gates that somebody put into a folder, for the live page. It shows them and judges nothing."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from kvrelay.edge.system.unreadable import UNREADABLE

MAX_FILES = 200
MAX_FILE_BYTES = 4 * 2**20
VERDICTS = ("pass", "fail", "unknown")


class Result(Struct, frozen=True, kw_only=True):
    """One verdict. `kind`: drill or gates."""

    kind: str
    name: str
    verdict: str
    about: str
    details: tuple[tuple[str, str], ...]  # verdict and words, of each promise or gate
    at: str  # of its file, UTC


class Results(Struct, frozen=True, kw_only=True):
    """`badge`: every drill passed, and there are some: the service is predictable when the cache fails."""

    folder: str | None
    results: tuple[Result, ...] = ()
    unreadable: tuple[str, ...] = ()
    badge: bool = False


def read_results(folder: Path | None) -> Results:
    """Every JSON file in `folder` that has verdicts of drills or gates; others are left alone. Raises nothing."""
    if folder is None:
        return Results(folder=None)
    found: list[Result] = []
    unreadable: list[str] = []
    for file in sorted(folder.rglob("*.json*"))[:MAX_FILES] if folder.is_dir() else ():
        if file.suffix not in (".json", ".jsonl"):
            continue
        try:
            if file.stat().st_size > MAX_FILE_BYTES:
                continue
            at = datetime.fromtimestamp(file.stat().st_mtime, UTC).isoformat(timespec="seconds")
            found += [one for value in _values(file.read_bytes()) for one in _results(value, at)]
        except (OSError, *UNREADABLE):
            unreadable.append(file.name)
    drills = [result for result in found if result.kind == "drill"]
    return Results(
        folder=str(folder),
        results=tuple(found),
        unreadable=tuple(unreadable),
        badge=bool(drills) and all(drill.verdict == "pass" for drill in drills),
    )


def _values(text: bytes) -> list[Any]:
    """One value, or one in each line as `kvrelay drill run --json` prints them. Raises what msgspec raises."""
    try:
        return [msgspec.json.decode(text)]
    except UNREADABLE:
        return [msgspec.json.decode(line) for line in text.splitlines() if line.strip()]


def _results(value: Any, at: str) -> Iterator[Result]:
    """Drills and verdicts of gates, alone, in lists, or as members of a run's summary."""
    if isinstance(value, list):
        for one in value:
            yield from _results(one, at)
    if not isinstance(value, dict):
        return
    verdict, gates = value.get("verdict"), value.get("gates")
    if isinstance(value.get("drill"), str) and verdict in VERDICTS:
        details = _details(value.get("promises"), "promise", "observed")
        about = str(value.get("cannot") or f"on a fleet of kind {value.get('fleet', 'unknown')}")
        yield Result(kind="drill", name=value["drill"], verdict=verdict, about=about, details=details, at=at)
    elif isinstance(gates, list) and verdict in VERDICTS:
        about = f"{value.get('label', 'no label')}; {value.get('promotion', 'promotion unknown')}"
        name = f"{value.get('candidate', '?')} against {value.get('baseline', '?')}"
        details = _details(gates, "name", "reason")
        yield Result(kind="gates", name=name, verdict=verdict, about=about, details=details, at=at)
    for inner in (value.get("drills"), value.get("results"), gates if isinstance(gates, dict) else None):
        yield from _results(inner, at)


def _details(entries: Any, name: str, words: str) -> tuple[tuple[str, str], ...]:
    if not isinstance(entries, list):
        return ()
    known = (one for one in entries if isinstance(one, dict))
    return tuple((_verdict(one), f"{one.get(name, '')}: {one.get(words, '')}") for one in known)


def _verdict(entry: dict[str, Any]) -> str:
    return str(entry.get("verdict", entry.get("outcome", "unknown")))
