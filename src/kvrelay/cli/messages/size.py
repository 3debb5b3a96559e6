"""What `kvrelay size` says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvrelay.lab.report.table import Table

ASSUMED_BYTES = (
    "note: a token is taken for {bytes:,.0f} bytes of KV (32 layers, 8 KV heads of 128, 16 bit); say yours with "
    "`--kv-bytes-per-token`, or with --layers, --kv-heads, --head-dim and --kv-bits"
)
NOT_VALIDATED = (
    "Validation: error unknown; the curve is not held against your fleet. `kvrelay simulate --measured RECEIPTS` "
    "states it (docs/evidence/simulator-validation.md)."
)


def block(title: str, table: Table) -> str:
    return f"{title}\n{table.text()}\n"


def assumed_bytes(amount: float) -> str:
    return ASSUMED_BYTES.format(bytes=amount)


def nothing_to_size() -> str:
    return (
        "error: nothing to size\n"
        "  legal: TRACE (or --demo) for capacity, `--live URL` for break-even, or both\n"
        "hint: kvrelay size --demo"
    )


def part_of_geometry(given: Iterable[str], missing: Iterable[str]) -> str:
    return (
        f"error: {', '.join(f'`{name}`' for name in given)} without {', '.join(f'`{name}`' for name in missing)}\n"
        "  legal: all of --layers, --kv-heads, --head-dim, or `--kv-bytes-per-token`"
    )


def part_of_prices() -> str:
    return (
        "error: one price alone says nothing about a net\n"
        "  legal: `--price-per-gb-month` and `--price-per-million-prefill-tokens` together"
    )


def part_of_memory(missing: str) -> str:
    return (
        f"error: the check of memory needs `{missing}` too\n"
        "  legal: --host-gb, --engine-gb and --cache-gb together, perhaps --buffer-gb"
    )


def sweep_needs_a_trace() -> str:
    return "error: `--sweep` compares sizes on a trace, and none was given\nhint: kvrelay size TRACE --sweep 5,20,80"


def recommended(capacity_bytes: float) -> str:
    if not capacity_bytes:
        return "Recommended: no such tier. None of these sizes saves enough."
    return f"Recommended: {capacity_bytes / 1e9:,.3g} GB. Each size against the one before it:"


def bad_tier(received: str) -> str:
    return f"error: `--tier` is `{received}`\n  legal: NAME=GB, nearest first, such as --tier gpu=40 --tier cpu=200"


def bad_link(received: str) -> str:
    return (
        f"error: `--link` is `{received}`\n"
        "  legal: NAME=GBYTES_PER_S,LATENCY_MS such as --link rdma=12.5,0.05 --link ethernet=1.25,0.5"
    )


def no_rates(url: str) -> str:
    return (
        f"error: {url} has learned no prefill rate yet: no request with a prefill to time has ended\n"
        "hint: send it some traffic, or state rates with `--prefill-tokens-per-s`"
    )


def no_store(url: str, reason: object) -> str:
    return f"error: cannot measure the store {url}: {reason}\nhint: it must take two objects of 4 KiB and 8 MiB"


def memory_refused() -> str:
    return "error: that cache would push the host out of memory; take at most what is left"


def page_written(path: object) -> str:
    return f"page: {path}"
