"""Wrong bytes for every port of a gateway.

    python -m bench.fuzz --minutes 5 [--seed S] [--part requests|answers|admin]... [--report FILE]
    python -m bench.fuzz --seed S --case requests:1234

A gateway in this process, before a worker that notes what no strict reader would take. Three parts: what clients send
to the data port, what workers answer, and what is asked of the admin port. Promised: no error, no hang, no answer that
is another request's, nothing left open. Exit code 1 when a promise is broken.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import logging
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from bench.fuzz.run import PARTS, Outcome, run_part

STUCK_S = 120.0  # a loop that does not turn cannot notice it


def main() -> int:
    asked = _arguments()
    print(f"seed {asked.seed}", file=sys.stderr, flush=True)
    logging.getLogger().addHandler(logging.NullHandler())
    outcomes = [_run(part, asked) for part in (asked.part or PARTS)] if asked.case is None else [_run_one(asked)]
    report = _report(asked.seed, outcomes)
    print(report)
    if asked.report is not None:
        asked.report.write_text(report + "\n")
    return 1 if any(outcome.findings for outcome in outcomes) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.fuzz")
    parser.add_argument("--minutes", type=float, default=3.0, help="of all parts together")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--part", action="append", choices=tuple(PARTS))
    parser.add_argument("--case", metavar="PART:NUMBER", help="run this one again")
    parser.add_argument("--report", type=Path, metavar="FILE")
    asked = parser.parse_args()
    part, _, number = (asked.case or "requests:0").partition(":")
    if part not in PARTS or not number.isdigit():
        parser.error(f"--case is `{asked.case}`; legal: {' or '.join(f'{part}:NUMBER' for part in PARTS)}")
    return asked


def _run(part: str, asked: argparse.Namespace) -> Outcome:
    seconds = asked.minutes * 60 / len(asked.part or PARTS)
    faulthandler.dump_traceback_later(seconds + STUCK_S, exit=True)
    outcome = uvloop.run(run_part(part, seed=asked.seed, numbers=itertools.count(), seconds=seconds))
    faulthandler.cancel_dump_traceback_later()
    print(f"{part}: {outcome.cases} cases, {len(outcome.findings)} findings", file=sys.stderr, flush=True)
    return outcome


def _run_one(asked: argparse.Namespace) -> Outcome:
    part, _, number = asked.case.partition(":")
    return uvloop.run(run_part(part, seed=asked.seed, numbers=[int(number)], seconds=STUCK_S))


def _report(seed: int, outcomes: Sequence[Outcome]) -> str:
    lines = [f"fuzz, seed {seed}", ""]
    for outcome in outcomes:
        verdict = "fail" if outcome.findings else "pass" if outcome.cases else "unknown"
        lines.append(f"{verdict:<8} {outcome.part:<9} {outcome.cases} cases in {outcome.seconds:.0f} s")
    for finding in (each for outcome in outcomes for each in outcome.findings):
        lines += ["", f"{finding.case}: broken: {finding.promise}", f"  observed: {finding.observed}"]
        lines += [f"  sent: {finding.sent}"] if finding.sent else []
        lines.append(f"  again: python -m bench.fuzz --seed {seed} --case {finding.case}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
