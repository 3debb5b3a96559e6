"""The order of arms: a Latin square, so that no policy always runs first, last or after the same neighbour."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.lab.arms.settings import Order, Reset
from kvrelay.lab.replay.replay import Arm


class OrderRefused(Exception):
    """The order would not do what it is chosen for."""


def arms_in_order(policies: Sequence[str], repeats: int, *, order: Order, reset: Reset) -> list[Arm]:
    """Raises OrderRefused."""
    if order is Order.LATIN:
        return rotated_order(policies, repeats)
    if reset is Reset.NONE:
        raise OrderRefused(
            "ABBA balances drift, not caches: without a reset every arm meets the blocks of those before"
        )
    return abba_order(policies, repeats)


def rotated_order(policies: Sequence[str], repeats: int) -> list[Arm]:
    """Every repeat has every policy once and starts one policy later than the repeat before it."""
    count = len(policies)
    return [
        Arm(policies[(position + repeat) % count], repeat) for repeat in range(repeats) for position in range(count)
    ]


def abba_order(policies: Sequence[str], repeats: int) -> list[Arm]:
    """Every second repeat runs backwards."""
    return [Arm(policy, repeat) for repeat in range(repeats) for policy in policies[:: -1 if repeat % 2 else 1]]
