"""What `kvrelay simulate` says."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvrelay.lab.report.table import Table
    from kvrelay.lab.sim.story import Validation

NOT_VALIDATED = (
    "Validation: error unknown; this run is not held against your fleet. Give the receipts of a real run of the same "
    "trace with `--measured FILE`, and the error is printed (docs/evidence/simulator-validation.md)."
)


def tables(found: list[Table]) -> str:
    return "\n\n".join(table.text() for table in found) + "\n"


def validated(validation: Validation) -> str:
    if validation.error is None:
        return "Validation: the measured run hit nothing, so there is no error to state."
    return (
        f"Validation: {validation.predicted_hit_tokens:,} hit tokens predicted, {validation.measured_hit_tokens:,} "
        f"measured over {validation.measured_requests:,} requests: error {100 * validation.error:+.2f} %."
    )


def progress(done: int, total: int) -> str:
    return f"{done} of {total} cells done"


def digest(value: str) -> str:
    return f"digest {value}"


def page_written(path: object) -> str:
    return f"page: {path}"


def bad_number_list(option: str, received: str, legal: str) -> str:
    return f"error: `{option}` is `{received}`\n  legal: {legal}"


def too_small(blocks: int, longest: int) -> str:
    return (
        f"note: {blocks:,} blocks hold no request of {longest:,} blocks, the longest of this trace; "
        "an engine of that size refuses it, and so does the simulation"
    )


def other_mode(option: str, mode: str, right: str) -> str:
    return f"error: `{option}` says nothing in mode `{mode}`\nhint: `--mode {right}`"


def dask_missing(reason: str) -> str:
    return f"error: `--dask` needs what the extra `dask` installs: {reason}\nhint: pip install 'kvrelay[dask]'"


def no_cluster(reason: str) -> str:
    return f"error: no Dask scheduler at {reason}\nhint: `--dask local` starts one on this machine"


def many_measured(policies: list[str]) -> str:
    return (
        "error: `--measured` is compared with exactly one cell, and this call has several\n"
        f"  the receipts were made under: {', '.join(policies)}\n"
        "hint: name one policy or cache and one `--blocks`"
    )
