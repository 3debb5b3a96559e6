"""Fetch or compute anew: both durations are predicted from what was observed last.

A fetch of n bytes is taken to last a + b * n. Both are fitted by least squares over observations that fade by a fixed
factor each time, so that a link that became slow or fast is believed after a handful of fetches. With one size only, b
alone is fitted and a is 0: nothing can tell them apart then.
"""

from __future__ import annotations

from msgspec import Struct

_FADE = 0.7  # weight of everything before, at each observation: half of it is gone after two
_ANOTHER_LINK = 4.0  # off by this factor, an observation replaces the past instead of fading it
_FLAT = 1e-6  # relative variance of sizes below which they count as equal


class FetchRate:
    """What fetching from one tier costs."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def known(self) -> bool:
        return self._weight > 0

    def observe(self, fetched_bytes: int, seconds: float) -> None:
        expected = self.predict_s(fetched_bytes)
        if expected is not None and not expected / _ANOTHER_LINK < seconds < expected * _ANOTHER_LINK:
            self._weight = self._x = self._y = self._xx = self._xy = 0.0
        for name, value in (
            ("_weight", 1.0),
            ("_x", float(fetched_bytes)),
            ("_y", seconds),
            ("_xx", float(fetched_bytes) ** 2),
            ("_xy", fetched_bytes * seconds),
        ):
            setattr(self, name, getattr(self, name) * _FADE + value)

    def predict_s(self, wanted_bytes: int) -> float | None:
        """None before the first observation."""
        if not self.known:
            return None
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x**2
        if variance <= _FLAT * mean_x**2:
            return mean_y * wanted_bytes / mean_x if mean_x else mean_y
        slope = max(0.0, (self._xy / self._weight - mean_x * mean_y) / variance)
        base = mean_y - slope * mean_x
        if base < 0:  # a straight line through the origin fits better than a negative start
            slope, base = mean_y / mean_x, 0.0
        return base + slope * wanted_bytes

    def bytes_per_s(self) -> float | None:
        return self._x / self._y if self._y > 0 else None


class PrefillRate:
    """Tokens per second of this worker's prefill, fading likewise."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        if tokens > 0 and seconds > 0:
            self._tokens = self._tokens * _FADE + tokens
            self._seconds = self._seconds * _FADE + seconds

    def predict_s(self, tokens: int) -> float | None:
        return tokens * self._seconds / self._tokens if self._tokens else None


class BreakEven(Struct, frozen=True):
    """Both predictions and what follows. `fetch` is true as long as one of them is unknown: only trying tells."""

    fetch: bool
    fetch_ms: float | None
    recompute_ms: float | None
    reason: str = ""


def decide(fetch_s: float | None, recompute_s: float | None) -> BreakEven:
    fetch_ms = None if fetch_s is None else fetch_s * 1000
    recompute_ms = None if recompute_s is None else recompute_s * 1000
    if fetch_ms is None or recompute_ms is None or fetch_ms <= recompute_ms:
        return BreakEven(True, fetch_ms, recompute_ms)
    return BreakEven(
        False, fetch_ms, recompute_ms, f"fetching would take {fetch_ms:.1f} ms, computing {recompute_ms:.1f} ms"
    )
