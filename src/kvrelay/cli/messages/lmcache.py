"""What `kvrelay config explain-lmcache` says."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.edge.connectors.lmcache.verdict import Verdict


def unreadable(file: str, fault: Exception) -> str:
    detail = fault.strerror if isinstance(fault, OSError) else str(fault)
    return f"error: cannot read `{file}` (from the command line): {detail}"


def no_host_memory() -> str:
    return "error: this machine does not say how much memory it has\nhint: give it with --host-memory GIB"


def refused(file: str, verdicts: Sequence[Verdict]) -> str:
    lines = [f"error: {len(verdicts)} of the fields cannot be taken over (from {file})"]
    lines += [f"  `{verdict.field}` is `{verdict.value}`: {verdict.reason}" for verdict in verdicts]
    return "\n".join([*lines, "hint: change or remove them; nothing was converted"])
