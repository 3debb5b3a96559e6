"""Faults that can be switched on over the admin path or at the start. They are data; who applies them asks here.

`count` says how often a fault strikes before it is spent (null: until it is removed), `probability` how likely it
strikes at each occasion (null: always), drawn from the worker's seed.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

# kind -> parameters it takes, besides `count` and `probability`
REQUEST_FAULTS: dict[str, tuple[str, ...]] = {
    "delay": ("path", "ms"),
    "refuse": ("path", "listener_down_s"),
    "429": ("path", "retry_after_s"),
    "503": ("path", "retry_after_s"),
    "500": ("path",),
    "hang": ("path", "after_chunks"),
    "die_after_chunks": ("path", "chunks"),
    "garbage": ("path",),
}
EVENT_FAULTS: dict[str, tuple[str, ...]] = {
    "stop_publishing": (),
    "drop_event": ("seq",),
}
ONE_SHOT_FAULTS: dict[str, tuple[str, ...]] = {
    "corrupt_block": ("block_hash", "every"),
}
KINDS = {**REQUEST_FAULTS, **EVENT_FAULTS, **ONE_SHOT_FAULTS}


class FaultError(ValueError):
    """The description of a fault is not legal; the text says what would be."""


class Fault(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One fault. Only the members that its kind takes can be set."""

    kind: str
    count: int | None = None
    probability: float | None = None
    path: str = "/v1/"  # requests whose path begins like this; health and metrics stay well unless named
    ms: float = 0.0
    listener_down_s: float | None = None
    retry_after_s: int | None = None
    after_chunks: int | None = None
    chunks: int = 0
    seq: int | None = None
    block_hash: int | None = None
    every: int = 1


def parse_fault(received: Mapping[str, Any]) -> Fault:
    """A legal fault, or FaultError with the nearest legal name."""
    kind = received.get("kind")
    if not isinstance(kind, str):
        raise FaultError(f"`kind` is missing or no text; known kinds: {', '.join(KINDS)}")
    if kind not in KINDS:
        raise FaultError(_unknown("fault kind", kind, list(KINDS)))
    legal = ["kind", *_common(kind), *KINDS[kind]]
    for name in received:
        if name not in legal:
            raise FaultError(_unknown(f"parameter of `{kind}`", name, legal))
    try:
        fault = msgspec.convert(received, Fault)
    except msgspec.ValidationError as error:
        raise FaultError(f"fault `{kind}`: {error}") from error
    _check_ranges(fault)
    return fault


class FaultBook:
    """The faults that are on. Asking whether one strikes spends it."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._faults: list[tuple[Fault, int | None]] = []

    def add(self, fault: Fault) -> None:
        assert fault.kind not in ONE_SHOT_FAULTS, f"{fault.kind} is done at once, not kept"
        self._faults.append((fault, fault.count))

    def clear(self) -> None:
        self._faults.clear()

    def active(self) -> list[dict[str, Any]]:
        """Each fault with how often it will still strike."""
        return [{**msgspec.to_builtins(fault), "remaining": left} for fault, left in self._faults]

    def strike_request(self, path: str) -> list[Fault]:
        """Faults for one request: any delays, and at most one fault of another kind."""
        struck: list[Fault] = []
        decided = False
        for fault, _ in tuple(self._faults):
            if fault.kind not in REQUEST_FAULTS or not path.startswith(fault.path):
                continue
            if (fault.kind != "delay" and decided) or not self._strikes(fault):
                continue
            struck.append(fault)
            decided = decided or fault.kind != "delay"
        return struck

    def withholds_batch(self, seq: int) -> bool:
        """Whether the event batch with this number stays unsent."""
        for fault, _ in tuple(self._faults):
            if fault.kind == "stop_publishing" and self._strikes(fault):
                return True
            if fault.kind == "drop_event" and fault.seq in (None, seq) and self._strikes(fault):
                return True
        return False

    def _strikes(self, fault: Fault) -> bool:
        if fault.probability is not None and self._chance.random() >= fault.probability:
            return False
        for i, (known, left) in enumerate(self._faults):
            if known is fault and left is not None:
                self._faults[i : i + 1] = [(fault, left - 1)] if left > 1 else []
                break
        return True


def _common(kind: str) -> tuple[str, ...]:
    return () if kind in ONE_SHOT_FAULTS else ("count", "probability")


def _unknown(what: str, received: str, legal: list[str]) -> str:
    nearest = difflib.get_close_matches(received, legal, n=1, cutoff=0.5)
    hint = f"; did you mean `{nearest[0]}`?" if nearest else ""
    return f"unknown {what} `{received}`; known: {', '.join(legal)}{hint}"


def _check_ranges(fault: Fault) -> None:
    legal = {
        "count": fault.count is None or fault.count >= 1,
        "probability": fault.probability is None or 0.0 <= fault.probability <= 1.0,
        "ms": fault.ms >= 0.0,
        "listener_down_s": fault.listener_down_s is None or 0.0 < fault.listener_down_s <= 3600.0,
        "retry_after_s": fault.retry_after_s is None or fault.retry_after_s >= 0,
        "after_chunks": fault.after_chunks is None or fault.after_chunks >= 0,
        "chunks": fault.chunks >= 0,
        "seq": fault.seq is None or fault.seq >= 0,
        "every": fault.every >= 1,
    }
    for name, ok in legal.items():
        if not ok:
            raise FaultError(f"`{name}` of `{fault.kind}` is out of range: {getattr(fault, name)}")
