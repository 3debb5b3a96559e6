"""Whatever ends by time does end: nobody waits for a place beyond the limit, and no deadline is without a wake-up.

Both are looked at after every step. A receipt says how long a request has waited only once it is over, and a router
that asks for no wake-up still goes on for as long as other events come by.
"""

from __future__ import annotations

from kvrelay.core.model.effects import Dispatch, Effect, WakeAt, WriteReceipt
from kvrelay.core.model.events import Event, RequestArrived, WokeUp
from kvrelay.lab.drills.fuzz.invariant import hold

_AT_ONE_INSTANT_S = 0.001  # of what is due at one time the wake-up may come last


class Clocks:
    """`next_due_s` of `after` is what the router says itself to be due next."""

    def __init__(self, *, longest_wait_s: float) -> None:
        self._longest_wait_s = longest_wait_s
        self._waiting_since: dict[str, float] = {}  # arrived, nobody was asked yet; the oldest first
        self._alarms: list[float] = []  # asked of the host, and still to come

    def stood_still(self, for_s: float) -> None:
        """The gateway, so nobody's waiting could be ended in that time."""
        for request_id in self._waiting_since:
            self._waiting_since[request_id] += for_s

    def gateway_restarted(self) -> None:
        self._waiting_since.clear()
        self._alarms.clear()

    def after(self, now_s: float, event: Event, effects: tuple[Effect, ...], next_due_s: float | None) -> None:
        match event:
            case RequestArrived():
                self._waiting_since[event.request_id] = now_s
            case WokeUp():
                self._alarms = [at_s for at_s in self._alarms if at_s > now_s]
            case _:
                pass
        for effect in effects:
            match effect:
                case Dispatch():
                    self._waiting_since.pop(effect.request_id, None)
                case WriteReceipt():
                    self._waiting_since.pop(effect.receipt.request_id, None)
                case WakeAt():
                    self._alarms.append(effect.at)
                case _:
                    pass
        self._nobody_waits_too_long(now_s)
        self._somebody_will_call(now_s, next_due_s)

    def _nobody_waits_too_long(self, now_s: float) -> None:
        for request_id, since_s in self._waiting_since.items():
            waited_s = now_s - since_s
            hold(
                waited_s <= self._longest_wait_s + _AT_ONE_INSTANT_S,
                f"{request_id} waits for a place since {waited_s:.1f} s",
            )
            return  # the others came later

    def _somebody_will_call(self, now_s: float, due_s: float | None) -> None:
        if due_s is not None:
            rings_s = min(self._alarms, default=float("inf"))
            hold(
                rings_s <= max(due_s, now_s),
                f"something is due in {due_s - now_s:.3f} s, and the router has asked for no wake-up by then",
            )
