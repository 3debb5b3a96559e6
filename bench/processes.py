"""What several gateway processes on one port cost and bring, beside one of them.

Everybody may use every core: generator and workers take their share of them, so on a machine of few cores the rate is
bounded by the rig (its own rate without a gateway stands beside it), and the figure to look at is the CPU time per
request, summed over all processes of the gateway: what it is to be a group. The kernel spreads connections, not
requests; how evenly it did is the busiest process over the mean.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from bench.figure import Figure
from bench.gateway import WARM_UP, completions, drive_all, serve_arguments, upstream_arguments, wait_routable
from bench.rig.load import Load
from bench.rig.processes import Pinned, pinned

COUNTS = (1, 2, 4)
CONNECTIONS = 64
REQUESTS = 6_000


def run() -> Iterator[Figure]:
    with pinned(upstream_arguments(4.0), core=None) as workers:
        straight = drive_all(workers.ready[0], completions(REQUESTS), CONNECTIONS)
        alone_us: float | None = None
        for count in COUNTS:
            environment = {"KVRELAY_GATEWAY__PROCESSES": str(count)}
            with pinned(serve_arguments(workers.ready, "cache_load"), core=None, environment=environment) as gateway:
                wait_routable(gateway.ready["admin_url"], len(workers.ready))
                drive_all(gateway.ready["url"], completions(WARM_UP), CONNECTIONS)
                spent_s, load = _measured(gateway)
            cpu_us = sum(spent_s) / load.requests * 1e6
            yield from _figures(count, cpu_us, alone_us, spent_s, load, straight)
            alone_us = alone_us or cpu_us


def _measured(gateway: Pinned) -> tuple[list[float], Load]:
    """CPU time of each process, and what it was spent on."""
    before = gateway.family_cpu_s()
    load = drive_all(gateway.ready["url"], completions(REQUESTS), CONNECTIONS)
    return [now_s - before.get(pid, 0.0) for pid, now_s in gateway.family_cpu_s().items()], load


def _figures(
    count: int, cpu_us: float, alone_us: float | None, spent_s: list[float], load: Load, straight: Load
) -> list[Figure]:
    noun = "process" if count == 1 else "processes"
    relaying = sorted(spent_s)[-count:]  # the one that looks after a group serves nobody
    return [
        Figure(f"CPU per 1 KB request, cache_load, {count} {noun}", cpu_us, "us", None, alone_us, "one process"),
        Figure(
            f"  requests per second, {count} {noun}, {len(os.sched_getaffinity(0))} cores for all",
            load.requests / load.wall_s,
            "1/s",
            None,
            straight.requests / straight.wall_s,
            "without gateway",
        ),
        Figure("  p99", load.percentile_ms(99), "ms", None, straight.percentile_ms(99), "without gateway"),
        Figure("  busiest process over the mean", max(relaying) * count / sum(relaying), "x"),
    ]
