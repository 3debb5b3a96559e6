"""What `kvrelay drill` says."""

from __future__ import annotations

from kvrelay.lab.drills.fuzz.campaign import Found
from kvrelay.lab.drills.run import DrillResult


def begun(name: str, title: str) -> str:
    return f"{name}: {title} ..."


def result_lines(result: DrillResult, *, in_full: bool) -> str:
    """One line, and below it what was not kept; all promises if asked for or if there is one drill only."""
    lines = [f"{result.verdict:8} {result.drill} ({result.fleet})"]
    if result.cannot is not None:
        lines.append(f"         not carried out: {result.cannot}")
    for judged in result.promises:
        if in_full or judged.verdict != "pass":
            lines.append(f"  {judged.verdict:8} {judged.promise}: {judged.observed}")
    return "\n".join(lines)


def pages_written(out: str) -> str:
    return f"pages and evidence: {out}"


def unusable_fleet(source: str, problem: str) -> str:
    return f"error: no drill is run on the fleet of {source}: {problem}"


def unconfirmed(source: str, targets: list[str]) -> str:
    listed = "\n".join(f"  {target}" for target in targets)
    return (
        f"error: a drill breaks what it is pointed at, and {source} is not confirmed as a staging fleet\n"
        f"it would strike:\n{listed}\n"
        "hint: confirm each of them: " + " ".join(f"--confirm {target}" for target in targets)
    )


def fuzzing(first: int, seeds: int, jobs: int) -> str:
    return f"seeds {first} to {first + seeds - 1}, {jobs} {'process' if jobs == 1 else 'processes'}"


def nothing_found(seeds: int, seconds: float) -> str:
    return f"{seeds} schedules in {seconds:.0f} s: every invariant held"


def failure_found(found: Found, kept_in: str | None) -> str:
    failure = found.failure
    lines = [
        f"seed {found.seed} fails (version {found.version}, commit {found.commit or 'unknown'})",
        f"  {failure.what}",
        *([f"  in {failure.where}"] if failure.where else []),
        f"  at {failure.at_s} virtual seconds; schedule shrunk from {found.ops_before} to {found.ops} operations",
    ]
    if kept_in is not None:
        lines.append(f"hint: kvrelay drill fuzz --replay {kept_in}")
    return "\n".join(lines)
