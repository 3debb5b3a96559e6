"""How an invariant is stated: it holds, or the run ends with what was seen."""

from __future__ import annotations


class Broken(AssertionError):
    """An invariant does not hold."""


def hold(ok: bool, otherwise: str) -> None:
    if not ok:
        raise Broken(otherwise)
