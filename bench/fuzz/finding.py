"""What the fuzz found, with what is needed to see it again."""

from __future__ import annotations

import random

from msgspec import Struct


class Finding(Struct, frozen=True):
    """One broken promise. `case` goes into `--case`; `sent` is what provoked it, in Python's notation."""

    case: str
    promise: str
    observed: str
    sent: str


class BrokenPromise(Exception):
    """Raised inside a case: (promise, observed)."""

    def __init__(self, promise: str, observed: str) -> None:
        super().__init__(promise, observed)
        self.promise = promise
        self.observed = observed


def chance_of(seed: int, part: str, number: int) -> random.Random:
    """A case has a stream of its own, so that it can be repeated without the ones before it."""
    return random.Random(f"{seed}/{part}/{number}")


def shortened(data: bytes, limit: int = 3000) -> str:
    text = repr(data)
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]} ({len(data)} bytes)"
