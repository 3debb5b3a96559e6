"""Agents over two workers, every policy isolated, repeats interleaved in rotating order; gates stand in `gates.py`.

Every repeat is a draw of its own (`--seed`, the next one, ...), the same for every policy: one order of arrival, run
three times, would show the noise of the machine and say nothing about the luck of that order.

    python -m bench.agents                          mock workers, ten times as fast as a CPU core; about two minutes
    python -m bench.agents --engine vllm --out FILE.md      real vLLM on CPU; about ten minutes

Exit code 1 when a promise was not kept.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from bench.agents import gates, traffic
from bench.agents.arms import Fleet, Result, run_arm
from bench.agents.fleets import mock, vllm
from bench.agents.gates import Gate
from kvrelay.core.stats.distribution import distribution
from kvrelay.core.traces.plan import Plan
from kvrelay.lab.replay.replay import Arm

POLICIES = ("round_robin", "sticky", "cache_load")
MakePlan = Callable[[int, float], Plan]
Judge = Callable[[Sequence[Result]], list[Gate]]
WORKLOADS: dict[str, tuple[MakePlan, Judge, tuple[str, ...]]] = {
    "sessions": (traffic.sessions, gates.sessions, POLICIES),
    "hot-prefix": (traffic.hot_prefix, gates.hot_prefix, ("round_robin", "cache_load")),
    "burst": (traffic.burst, gates.burst, ("cache_load",)),
}
MOCK_PACE = 10.0
# A p95 of three repeats is the eleventh-slowest of 210 first tokens: on a machine whose cores change their speed by the
# minute, chance decides whether it is a promise kept. Six say what the policies do.
REPEATS = {"mock": 3, "vllm": 6}


class Paced(Struct, frozen=True, eq=False):
    """What one repeat sends, and why that fast."""

    plan: Plan
    pace: float
    rate: float  # prefilled tokens per second of each worker, measured just before


def main() -> int:
    options = _options()
    lines: list[str] = []
    kept = True
    with mock(MOCK_PACE) if options.engine == "mock" else vllm() as fleet:
        for name in options.workload or list(WORKLOADS):
            make_plan, judge, policies = WORKLOADS[name]
            plans, results = asyncio.run(_run(fleet, make_plan, policies, options))
            verdicts = judge(results)
            kept &= all(gate.kept for gate in verdicts)
            section = _section(name, plans, fleet, results, verdicts)
            lines += section
            print("\n".join(section), flush=True)
    if options.out is not None:
        options.out.write_text("\n".join([*_head(options), *lines]) + "\n", encoding="utf-8")
    return 0 if kept else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.agents")
    parser.add_argument("--engine", choices=("mock", "vllm"), default="mock")
    parser.add_argument("--workload", choices=tuple(WORKLOADS), action="append")
    parser.add_argument("--repeats", type=int, help=f"unless given: {REPEATS}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--pace", type=float, help="of the traffic, see traffic.py; unless given, as the workers can bear"
    )
    parser.add_argument("--out", type=Path, help="a report in Markdown")
    options = parser.parse_args()
    options.repeats = options.repeats or REPEATS[options.engine]
    return options


async def _run(
    fleet: Fleet, make_plan: MakePlan, policies: Sequence[str], options: argparse.Namespace
) -> tuple[list[Paced], list[Result]]:
    """Every repeat at a pace that fits what the workers prefill then."""
    plans, results = [], []
    with tempfile.TemporaryDirectory(prefix="agents-") as folder:
        for repeat in range(options.repeats):
            rate = await asyncio.to_thread(fleet.measured_rate)
            pace = options.pace or traffic.LOAD * rate / 1_000
            plan = make_plan(options.seed + repeat, pace)
            plans.append(Paced(plan, pace, rate))
            at = repeat % len(policies)
            for policy in (*policies[at:], *policies[:at]):
                print(f"{policy}, repeat {repeat + 1} of {options.repeats} ...", file=sys.stderr, flush=True)
                arm = Arm(policy, repeat)
                results.append(await run_arm(fleet, plan, arm, Path(folder) / f"{policy}-{repeat}"))
    return plans, results


def _head(options: argparse.Namespace) -> list[str]:
    command = f"python -m bench.agents --engine {options.engine} --repeats {options.repeats} --seed {options.seed}"
    if options.pace is not None:
        command += f" --pace {options.pace:g}"
    return [
        "# Agents over two workers",
        "",
        f"`{command}`",
        "",
        "Workloads, isolation and gates are described in `bench/agents/`; the gates were written before the runs.",
        f"Results of {'a CPU' if options.engine == 'vllm' else 'mock workers'}: they show reuse and balance, and say "
        "nothing about the speed of a GPU.",
    ]


def _section(
    name: str, plans: Sequence[Paced], fleet: Fleet, results: Sequence[Result], verdicts: Sequence[Gate]
) -> list[str]:
    rows = [_row(result) for result in sorted(results, key=lambda result: (result.policy, result.repeat))]
    return [
        "",
        f"## {name} ({fleet.label})",
        "",
        f"Per repeat {plans[0].plan.requests} requests in an order of their own; plans "
        f"{', '.join(each.plan.digest()[:12] for each in plans)}. One endless cache would hit "
        f"{max(result.ceiling_share for result in results):.1%}. Before each repeat, a worker prefilled "
        f"{', '.join(f'{each.rate:,.0f}' for each in plans)} tokens per second while both did; the pace was "
        f"{', '.join(f'{each.pace:.2f}' for each in plans)}.",
        "",
        "| policy | repeat | hits | requests by worker | prefilled tokens by worker | max/mean | p50 TTFT ms "
        "| p95 TTFT ms | claims within a block |",
        "|---|---|---|---|---|---|---|---|---|",
        *rows,
        "",
        "| promise | measured | kept |",
        "|---|---|---|",
        *(f"| {gate.promise} | {gate.measured} | {'yes' if gate.kept else '**no**'} |" for gate in verdicts),
    ]


def _row(result: Result) -> str:
    ttft = distribution(result.ttft_ms)
    return (
        f"| {result.policy} | {result.repeat + 1} | {result.hit_share:.1%} | {_by_worker(result.requests_of)} | "
        f"{_by_worker(result.prefilled_of)} | {result.prefilled_max_over_mean:.3f} | {ttft.p50:.0f} | {ttft.p95:.0f} | "
        f"{result.within_one_block:.1%} |"
    )


def _by_worker(counts: dict[str, int]) -> str:
    return " / ".join(f"{counts[name]:,}" for name in sorted(counts))


if __name__ == "__main__":
    sys.exit(main())
