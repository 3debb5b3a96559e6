"""What the breaker has asked for, between the simulated gateway and its workers. Calm until told otherwise."""

from __future__ import annotations

from kvrelay.core.model.effects import Dispatch, RequestReplay
from kvrelay.core.model.events import KvEvent
from kvrelay.core.model.ids import WorkerId
from kvrelay.core.model.units import Fault
from kvrelay.lab.sim.weather import Carried, Fate, Refused, Weather

CONNECT_TIMEOUT_S = 2.0
OVERTAKEN_BY_S = 0.050
_FAULTS = {429: Fault.BACK_PRESSURE, 503: Fault.BACK_PRESSURE, 500: Fault.SERVER_ERROR}


class BrokenWeather(Weather):
    """All by worker name."""

    def __init__(self) -> None:
        self.cut_off: set[str] = set()
        self.slower_s: dict[str, float] = {}
        self.refusals: dict[str, tuple[int, int]] = {}  # status, how many are left
        self.lost_batches: dict[str, int | None] = {}
        self.doubled: set[str] = set()
        self.shuffled: set[str] = set()
        self.no_replay: set[str] = set()
        self._shuffle_turn: dict[str, int] = {}

    def attempt(self, now_s: float, dispatch: Dispatch) -> Fate:
        name = dispatch.worker.name
        if name in self.cut_off:
            return Refused(Fault.CONNECT_TIMEOUT, after_s=CONNECT_TIMEOUT_S)
        status, left = self.refusals.get(name, (0, 0))
        if left:
            self.refusals[name] = status, left - 1
            return Refused(_FAULTS[status], http_status=status, retry_after_s=1.0 if status != 500 else None)
        slower_s = self.slower_s.get(name, 0.0)
        return Carried(0.0005 + slower_s, 0.0005 + slower_s)

    def deliveries_s(self, now_s: float, worker: WorkerId, seq: int, events: tuple[KvEvent, ...]) -> tuple[float, ...]:
        name = worker.name
        if name in self.cut_off or self._loses(name):
            return ()
        delay_s = self.event_delay_s + self.slower_s.get(name, 0.0)
        if name in self.shuffled:
            turn = self._shuffle_turn[name] = self._shuffle_turn.get(name, 0) + 1
            delay_s += OVERTAKEN_BY_S * (turn % 2)
        return (delay_s, delay_s + 0.0001) if name in self.doubled else (delay_s,)

    def replay_s(self, now_s: float, effect: RequestReplay) -> float | None:
        name = effect.worker.name
        return (
            None if name in self.no_replay or name in self.cut_off else self.question_s + self.slower_s.get(name, 0.0)
        )

    def probe_s(self, now_s: float, worker: str) -> float | None:
        return None if worker in self.cut_off else self.question_s + self.slower_s.get(worker, 0.0)

    def scrape_s(self, now_s: float, worker: str) -> float | None:
        return self.probe_s(now_s, worker)

    def _loses(self, name: str) -> bool:
        if name not in self.lost_batches:
            return False
        left = self.lost_batches[name]
        if left == 0:
            return False
        self.lost_batches[name] = None if left is None else left - 1
        return True
