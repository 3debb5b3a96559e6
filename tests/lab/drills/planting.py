"""How a defect is planted: one function or value is put in the place of another for as long as a test lasts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

Plant = Callable[[pytest.MonkeyPatch], None]
FUZZ = "fuzz"


class Mutant(NamedTuple):
    """`caught_by`: `fuzz`, or the name of a drill."""

    name: str
    plant: Plant
    caught_by: str = FUZZ


def replacing(owner: Any, name: str, make: Callable[[Any], Any]) -> Plant:
    """`make` gets what is there and answers what takes its place."""
    return lambda patch: patch.setattr(owner, name, make(getattr(owner, name)))


def always(answer: Any) -> Callable[[Any], Any]:
    return lambda right: lambda *args, **more: answer
