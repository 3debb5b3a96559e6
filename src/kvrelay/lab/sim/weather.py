"""What the world may do to messages on their way. The base class is calm; a drill overrides what it wants to disturb.

Every method is asked once for each message, in the order in which messages are sent, so one that draws from a seeded
generator gives the same run for the same seed. Give each method that draws a generator of its own: then a further
disturbance of one kind does not shift the others.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from kvrelay.core.model.effects import Dispatch, RequestReplay
from kvrelay.core.model.events import KvEvent
from kvrelay.core.model.ids import WorkerId
from kvrelay.core.model.units import Fault


class Carried(Struct, frozen=True):
    """The attempt reaches its worker after `request_s`, and all that is said back takes `answer_s`."""

    request_s: float = 0.0005
    answer_s: float = 0.0005


class Refused(Struct, frozen=True):
    """The attempt ends with `fault` after `after_s`, and no engine hears of it (429, 503, 500, no connection)."""

    fault: Fault
    after_s: float = 0.001
    http_status: int | None = None
    retry_after_s: float | None = None


class BrokenOff(Struct, frozen=True):
    """The engine takes the attempt; the connection breaks when `after_tokens` tokens have come back."""

    after_tokens: int
    fault: Fault = Fault.RESET
    carried: Carried = Carried()


class Silent(Struct, frozen=True):
    """The engine takes the attempt and works, but after `after_tokens` tokens nothing comes back any more."""

    after_tokens: int = 0
    carried: Carried = Carried()


Fate = Carried | Refused | BrokenOff | Silent


class Weather:
    """Nothing goes wrong: small constant delays, every message once and in order."""

    event_delay_s = 0.001
    question_s = 0.001  # from asking a worker something (probe, scrape, replay) to its answer

    def attempt(self, now_s: float, dispatch: Dispatch) -> Fate:
        """What becomes of one attempt. A worker that is down or frozen adds its own trouble to this."""
        return Carried()

    def deliveries_s(self, now_s: float, worker: WorkerId, seq: int, events: tuple[KvEvent, ...]) -> tuple[float, ...]:
        """Delays of the copies of one event batch: () it is lost, two entries: it comes twice.

        A delay longer than that of a later batch puts the two out of order.
        """
        return (self.event_delay_s,)

    def replay_s(self, now_s: float, effect: RequestReplay) -> float | None:
        """Until the answer to a replay request is there; None: there never is one."""
        return self.question_s

    def replay_part(self, seqs: tuple[int, ...]) -> tuple[int, ...]:
        """Which of the batches that the worker still has come with the answer, by number."""
        return seqs

    def probe_s(self, now_s: float, worker: str) -> float | None:
        """Until a health probe is answered; None: it fails although the worker is well."""
        return self.question_s

    def scrape_s(self, now_s: float, worker: str) -> float | None:
        """Until a scrape of the worker's gauges is answered; None: it fails."""
        return self.question_s


class EventWeather(Weather):
    """Event streams alone are disturbed, each batch by itself with the stated chances.

    `uniform` is a source of chance in [0, 1), such as `random.Random(seed).random`. A delayed batch takes up to
    `spread_s` longer than others; whether that puts it behind a later one depends on how fast they follow.
    """

    def __init__(
        self,
        uniform: Callable[[], float],
        *,
        delay_s: float = 0.001,
        spread_s: float = 0.0,
        loss: float = 0.0,
        duplication: float = 0.0,
        replay: bool = True,
    ) -> None:
        self._uniform = uniform
        self.event_delay_s = delay_s
        self._spread_s = spread_s
        self._loss = loss
        self._duplication = duplication
        self._replay = replay

    def calm(self) -> None:
        """From now on every batch comes once, in order, and replays are answered."""
        self._spread_s = self._loss = self._duplication = 0.0
        self._replay = True

    def deliveries_s(self, now_s: float, worker: WorkerId, seq: int, events: tuple[KvEvent, ...]) -> tuple[float, ...]:
        lost, twice = self._uniform() < self._loss, self._uniform() < self._duplication
        delays = tuple(self.event_delay_s + self._uniform() * self._spread_s for _ in range(2))
        if lost:
            return ()
        return delays if twice else delays[:1]

    def replay_s(self, now_s: float, effect: RequestReplay) -> float | None:
        return self.question_s if self._replay else None
