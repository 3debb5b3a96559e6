"""Which block size a file has, from the lengths of its inputs and of its lists of ids.

A list names the full blocks of the input (`floor`), or also the partial last one (`ceil`); a file does the same on
every row. Each row leaves a range of sizes that agree with it, and all rows together usually leave one.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from kvrelay.core.contract.keys import MAX_BLOCK_TOKENS
from kvrelay.core.traces.trace import NotTold

SMALLEST_TOKENS = 8


class Listed(Struct, frozen=True):
    """One row: its line, its tokens, and how many ids it lists."""

    line: int
    input_tokens: int
    ids: int


class BlockSize(Struct, frozen=True):
    tokens: int
    notices: tuple[str, ...] = ()


def block_size_of(rows: Iterable[Listed], told: int | None) -> BlockSize:
    """Told: rows that disagree are counted in a notice. Not told: the size must follow, or it is asked for."""
    rows = list(rows)
    return _checked(rows, told) if told is not None else _inferred(rows)


def _checked(rows: list[Listed], told: int) -> BlockSize:
    too_many = sum(row.ids > -(-row.input_tokens // told) for row in rows)
    too_few = sum(row.ids < row.input_tokens // told for row in rows)
    notices = []
    if too_many:
        notices.append(f"{too_many} rows list more ids than their input has blocks of {told}: the surplus is left out.")
    if too_few:
        notices.append(f"{too_few} rows list fewer ids than their input has blocks of {told}: the rest is unique.")
    return BlockSize(told, tuple(notices))


def _inferred(rows: list[Listed]) -> BlockSize:
    legal = f"the number of blocks of one size for all rows, or the size told (8 to {MAX_BLOCK_TOKENS} tokens)"
    fitting = {"ceil": (SMALLEST_TOKENS, MAX_BLOCK_TOKENS), "floor": (SMALLEST_TOKENS, MAX_BLOCK_TOKENS)}
    for row in rows:
        narrowed = {rule: _narrowed(rule, limits, row) for rule, limits in fitting.items()}
        fitting = {rule: limits for rule, limits in narrowed.items() if limits[0] <= limits[1]}
        if not fitting:
            found = f"{row.ids} hash_ids for input_length {row.input_tokens}"
            raise NotTold(row.line, found, legal, option="block_size")
    sizes = sorted({size for low, high in fitting.values() for size in range(low, high + 1)})
    powers = [size for size in sizes if size & (size - 1) == 0]
    if len(sizes) > 1 and len(powers) != 1:
        found = f"lengths that agree with several block sizes ({_spoken(powers or sizes)})"
        raise NotTold(rows[0].line if rows else 1, found, "the block size told", option="block_size")
    size = sizes[0] if len(sizes) == 1 else powers[0]
    why = "the only size" if len(sizes) == 1 else f"the only power of two of {sizes[0]} to {sizes[-1]}"
    return BlockSize(size, (f"Block size {size} tokens: {why} that agrees with all {len(rows)} rows.",))


def _narrowed(rule: str, limits: tuple[int, int], row: Listed) -> tuple[int, int]:
    """ceil: ids - 1 < input / size <= ids. floor: ids <= input / size < ids + 1."""
    low, high = limits
    tokens, ids = row.input_tokens, row.ids
    if rule == "ceil":
        if ids == 0:
            return (low, high if tokens == 0 else -1)
        return max(low, -(-tokens // ids)), min(high, (tokens - 1) // (ids - 1) if ids > 1 else high)
    return max(low, tokens // (ids + 1) + 1), min(high, tokens // ids if ids else high)


def _spoken(sizes: list[int]) -> str:
    shown = ", ".join(map(str, sizes[:6]))
    return shown if len(sizes) <= 6 else f"{shown}, ... {sizes[-1]}"
