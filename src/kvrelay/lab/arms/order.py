"""The order of arms: a Latin square, so that no policy always runs first, last or after the same neighbour."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.lab.replay.replay import Arm


def rotated_order(policies: Sequence[str], repeats: int) -> list[Arm]:
    """Every repeat has every policy once and starts one policy later than the repeat before it."""
    count = len(policies)
    return [
        Arm(policies[(position + repeat) % count], repeat) for repeat in range(repeats) for position in range(count)
    ]
