"""The same drills on the same mock workers, before ours and before other routers: `python -m bench.drills.peers`.

Other routers are no dependencies: each is run by the Python that has it (`SMG_PYTHON`, `SGLANG_PYTHON`: an environment
with `smg`, with `sglang-router`; both install a script of the same name, so they need one each). What is not there is
named. What a router does not show makes a promise unknown; what it cannot be told makes the drill unknown.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

from kvrelay.lab.drills.catalog import ALL
from kvrelay.lab.drills.drill import Drill
from kvrelay.lab.drills.fleets.front import Front
from kvrelay.lab.drills.fleets.mock import MockProcessFleet
from kvrelay.lab.drills.fleets.other_router import OtherRouter
from kvrelay.lab.drills.fleets.our_gateway import OurGateway
from kvrelay.lab.drills.run import DrillResult, run_drill

DRILLS = ("worker-loss", "worker-term", "gateway-restart", "partition", "overload")
OURS = "kvrelay"
_ARGUMENTS = "--host 127.0.0.1 --port {port} --policy cache_aware --worker-urls {workers}"
COMMANDS = {
    "smg": ("SMG_PYTHON", f"-m smg launch {_ARGUMENTS} --model-path m --disable-tokenizer-autoload --log-level error"),
    "sglang-router": ("SGLANG_PYTHON", f"-m sglang_router.launch_router {_ARGUMENTS} --log-level error"),
}


def fronts() -> list[str]:
    found = [OURS]
    for name, (variable, _) in COMMANDS.items():
        if variable in os.environ:
            found.append(name)
        else:
            print(f"{name} has no row: {variable} names no Python that has it", file=sys.stderr)
    return found


def front(name: str) -> Front:
    if name == OURS:
        return OurGateway()
    variable, arguments = COMMANDS[name]
    return OtherRouter(f"{os.environ[variable]} {arguments}", name=name)


def _fleet(name: str, drill: Drill) -> MockProcessFleet:
    return MockProcessFleet(drill, front=front(name))


def run() -> dict[tuple[str, str], DrillResult | str]:
    """By drill and front; a text where the front did not even start."""
    results: dict[tuple[str, str], DrillResult | str] = {}
    for drill in DRILLS:
        for name in fronts():
            began_s = time.monotonic()
            try:
                played = asyncio.run(run_drill(ALL[drill], partial(_fleet, name)))
            except (TimeoutError, OSError) as problem:
                results[drill, name] = f"did not serve: {type(problem).__name__}"
                print(f"{drill} {name}: {results[drill, name]}", file=sys.stderr)
                continue
            results[drill, name] = played
            print(f"{drill} {name}: {played.verdict} ({time.monotonic() - began_s:.0f} s)", file=sys.stderr)
    return results


def report(results: dict[tuple[str, str], DrillResult | str]) -> str:
    names = list(dict.fromkeys(name for _, name in results))
    lines = [
        "# The same drills before several routers",
        "",
        "Mock workers on one machine; no model, no GPU. Each cell counts promises kept, broken and unknown, and",
        "says how the requests ended. Unknown is what a router does not show: receipts, claims, its books.",
        "Ours runs with the limits that a drill states (overload: four requests per worker, a queue of 24); others run",
        "with their defaults and their cache-aware policy, and get prompts as text: not all of them take token ids.",
        "",
        "| drill | " + " | ".join(names) + " |",
        "|---|" + "---|" * len(names),
    ]
    for drill in dict.fromkeys(drill for drill, _ in results):
        lines.append(f"| {drill} | " + " | ".join(_cell(results[drill, name]) for name in names) + " |")
    lines += ["", "## Broken promises", ""]
    for (drill, name), result in results.items():
        if isinstance(result, DrillResult):
            lines += [
                f"- `{drill}`, {name}: {judged.promise}: {judged.observed}"
                for judged in result.promises
                if judged.verdict == "fail"
            ]
    return "\n".join(lines) + "\n"


def _cell(result: DrillResult | str) -> str:
    if isinstance(result, str):
        return result
    if result.cannot is not None:
        return "unknown: cannot be told to"
    verdicts = Counter(judged.verdict for judged in result.promises)
    endings = Counter(outcome.ending for outcome in result.history.outcomes)
    ends = ", ".join(f"{count} {ending}" for ending, count in endings.most_common())
    return f"{verdicts['pass']} kept, {verdicts['fail']} broken, {verdicts['unknown']} unknown; {ends}"


if __name__ == "__main__":
    (Path(__file__).parent / "REPORT.md").write_text(report(run()), encoding="utf-8")
