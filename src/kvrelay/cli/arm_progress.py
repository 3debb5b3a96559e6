"""Progress of a run of arms on stderr: bars on a terminal, elsewhere one line per arm."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvrelay.cli import messages
from kvrelay.core.traces.cut import Cut
from kvrelay.core.traces.plan import Plan
from kvrelay.lab.arms.manifest import ArmFacts
from kvrelay.lab.replay.replay import Arm
from kvrelay.lab.replay.sample import Sample


class ArmProgress:
    """The bars are for the arms and for the requests of the current one; nothing of them stays on the screen."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._draws = console.is_terminal
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not self._draws,
        )
        self._arms = self._bars.add_task("arms", total=None)
        self._requests = self._bars.add_task("starting", total=None)
        self._per_arm = 0

    def planned(self, plan: Plan, cut: Cut, order: Sequence[Arm]) -> None:
        self._per_arm = plan.requests
        self._bars.update(self._arms, total=len(order))
        self._bars.console.print(messages.run_planned(plan, len(order)), markup=False, highlight=False, soft_wrap=True)

    def arm_started(self, arm: Arm) -> None:
        description = f"{arm.policy}, repeat {arm.repeat + 1}"
        self._bars.reset(self._requests, total=self._per_arm, description=description)

    def sampled(self, sample: Sample) -> None:
        self._bars.advance(self._requests)

    def arm_ended(self, facts: ArmFacts) -> None:
        self._bars.advance(self._arms)
        if not self._draws:
            messages.say(messages.arm_ended(facts))

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._bars.stop()
