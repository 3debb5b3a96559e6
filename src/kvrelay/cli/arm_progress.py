"""Progress bars of a run of arms on stderr: one for the arms, one for the requests of the current arm."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvrelay.core.traces.cut import Cut
from kvrelay.core.traces.plan import Plan
from kvrelay.lab.demo.manifest import ArmFacts
from kvrelay.lab.replay.replay import Arm
from kvrelay.lab.replay.sample import Sample


class ArmProgress:
    """Silent when stderr is no terminal. Nothing of it stays on the screen."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._arms = self._bars.add_task("arms", total=None)
        self._requests = self._bars.add_task("starting", total=None)
        self._per_arm = 0

    def planned(self, plan: Plan, cut: Cut, order: Sequence[Arm]) -> None:
        self._per_arm = plan.requests
        self._bars.update(self._arms, total=len(order))

    def arm_started(self, arm: Arm) -> None:
        description = f"{arm.policy}, repeat {arm.repeat + 1}"
        self._bars.reset(self._requests, total=self._per_arm, description=description)

    def sampled(self, sample: Sample) -> None:
        self._bars.advance(self._requests)

    def arm_ended(self, facts: ArmFacts) -> None:
        self._bars.advance(self._arms)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._bars.stop()
