"""CSV with a header, for the published traces that are tables of times and lengths."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvrelay.core.traces.trace import TraceError


def csv_rows(lines: Iterable[bytes], needed: Sequence[str]) -> Iterator[tuple[int, Mapping[str, str]]]:
    """Rows as mappings, numbered as lines of the file (the header is line 1)."""
    text = (line.decode("utf-8-sig", "replace") for line in lines)
    reader = csv.DictReader(text)
    legal = f"a header with {', '.join(f'`{name}`' for name in needed)}"
    missing = [name for name in needed if name not in (reader.fieldnames or ())]
    if missing:
        raise TraceError(1, f"no column `{missing[0]}`", legal)
    for row in reader:
        if any(row[name] is None for name in needed):
            raise TraceError(reader.line_num, "fewer columns than the header", legal)
        yield reader.line_num, row


def tokens(line: int, row: Mapping[str, str], column: str) -> int:
    try:
        number = float(row[column])
    except ValueError:
        number = -1.0
    if number < 0 or not number.is_integer():
        raise TraceError(line, f"`{column}` is `{row[column]}`", "a number of tokens, 0 or more")
    return int(number)
