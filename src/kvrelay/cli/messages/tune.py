"""What `kvrelay tune` says of its two halves."""

from __future__ import annotations

from collections.abc import Sequence


def story(training: str, rule: str, pick: str | None, held_out: str | None, folder: object) -> str:
    head = "MOCK RUN: modelled times on mock workers, not the performance of any engine"
    picked = "picked: none" if pick is None else f"picked by the rule: {pick}"
    parts = [head, f"training half:\n{training}", f"rule, stated before the run: {rule}\n{picked}"]
    if held_out is not None:
        parts.append(f"held-out half:\n{held_out}")
        parts.append(f"{folder}/held_out/report.html has the charts; {folder}/training is a whole run, too")
    return "\n\n".join(parts) + "\n"


def nothing_passes() -> str:
    return (
        "error: no weight vector passes on the training half\n"
        "hint: the table says how far each is off; other vectors can be given with `--weights`"
    )


def not_confirmed(pick: str, reasons: Sequence[str], *, failed: bool) -> str:
    """The pick passed where it was chosen, and not where it was not."""
    what = "fails on the held-out half: it fits the sessions it was chosen on" if failed else "could not be confirmed"
    return "\n".join([f"error: the pick {pick} {what}", *(f"  {reason}" for reason in reasons)])
