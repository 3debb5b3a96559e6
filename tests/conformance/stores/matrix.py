"""Which store meets which fault with which outcome, as a table without empty cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from tests.conformance.stores.faults import FAULTS
from tests.conformance.stores.service import SERVICE_FAULTS

STORES = ("memory", "shared memory", "file", "peer", "valkey", "cluster", "s3", "mooncake")
ALL_FAULTS = (*(fault.__name__ for fault in FAULTS), *(fault.__name__ for fault in SERVICE_FAULTS))

_NOBODY = "its calls run on the caller's own thread in this host's memory: there is nobody to wait for"
IMPOSSIBLE: dict[tuple[str, str], str] = {
    **{(store, fault): _NOBODY for store in ("memory", "shared memory") for fault in ("slow", "hung", "refused")},
    ("memory", "killed_mid_write"): "its only writer is the process that holds it: both die together",
}

Table = dict[str, Mapping[str, Counter[str]]]


def impossible_for(store: str) -> dict[str, str]:
    return {fault: why for (of, fault), why in IMPOSSIBLE.items() if of == store}


def missing(table: Table, stores: tuple[str, ...] = STORES) -> list[tuple[str, str]]:
    """Cells that have neither an outcome nor a reason, and cells that have both."""
    return [
        (store, fault)
        for store in stores
        for fault in ALL_FAULTS
        if bool(table.get(store, {}).get(fault)) == ((store, fault) in IMPOSSIBLE)
    ]


def printed(table: Table) -> str:
    """One line per fault; a cell that cannot be has the number of its reason below."""
    reasons = list(dict.fromkeys(IMPOSSIBLE.values()))
    stores = [store for store in STORES if store in table]
    lines = ["| fault | " + " | ".join(stores) + " |", "|---" * (len(stores) + 1) + "|"]
    for fault in ALL_FAULTS:
        cells = []
        for store in stores:
            why = IMPOSSIBLE.get((store, fault))
            outcomes = table[store].get(fault, Counter())
            if why is not None:
                cells.append(f"({reasons.index(why) + 1})")
            else:
                cells.append(", ".join(f"{outcome} {count}" for outcome, count in sorted(outcomes.items())))
        lines.append(f"| {fault} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, *(f"({i}) {reason}" for i, reason in enumerate(reasons, 1))])
