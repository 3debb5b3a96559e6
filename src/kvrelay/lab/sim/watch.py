"""What the fleet's watch does, under virtual time: probes, scrapes, identity, and events under the life that sent them.

The live counterpart is `edge/fleet/watch.py` with `event_feed.py`. As there, batches of a life that has not been
introduced are held until the worker has said who it is. What differs: the truth of who sent a batch is known here, so
a batch of an earlier life that comes late is fed as that life's (the router has to see that it is late).
"""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.core.model.effects import RequestReplay
from kvrelay.core.model.events import (
    Event,
    KvBatch,
    LoadReported,
    ProbeAnswered,
    ReplayArrived,
    ReplayUnavailable,
    WorkerJoined,
)
from kvrelay.core.model.ids import WorkerId
from kvrelay.lab.sim.agenda import Agenda
from kvrelay.lab.sim.weather import Weather
from kvrelay.lab.sim.worker import Life, Worker

JITTER = 0.2  # of the interval, so that many workers are not probed in step


class Watch:
    """The eyes on one worker, from its start to `close`."""

    def __init__(
        self,
        worker: Worker,
        *,
        agenda: Agenda,
        weather: Weather,
        feed: Callable[[Event], None],
        interval_s: float,
        uniform: Callable[[], float],
    ) -> None:
        self.known: WorkerId | None = None
        self._worker = worker
        self._agenda = agenda
        self._weather = weather
        self._feed = feed
        self._interval_s = interval_s
        self._uniform = uniform
        self._held: list[KvBatch] = []
        self._asking = False
        self._closed = False

    def start(self) -> None:
        """The worker is asked at once; probes and scrapes follow at their interval."""
        self._identify()
        self._again(self._probe)
        self._again(self._scrape)

    def close(self) -> None:
        """Nothing is fed after this."""
        self._closed = True

    # --- events ------------------------------------------------------------------------------------------------------

    def send(self, batch: KvBatch) -> None:
        """The worker published this; it travels, perhaps."""
        for delay_s in self._weather.deliveries_s(self._agenda.now_s, batch.worker, batch.seq, batch.events):
            self._agenda.after(delay_s, lambda: self._hear(batch))

    def _hear(self, batch: KvBatch) -> None:
        if self._closed:
            return
        life = self._worker.life
        if batch.worker == self.known or life is None or batch.worker != life.id:
            self._feed(batch)
            return
        self._held.append(batch)
        if not self._asking:
            self._asking = True
            self._agenda.after(self._weather.question_s, self._asked)

    def _asked(self) -> None:
        self._asking = False
        self._identify()

    def replay(self, effect: RequestReplay) -> None:
        """The answer is fed as ReplayArrived or ReplayUnavailable, unless the weather swallows it."""
        delay_s = self._weather.replay_s(self._agenda.now_s, effect)
        if delay_s is not None:
            self._agenda.after(delay_s, lambda: self._answer_replay(effect))

    def _answer_replay(self, effect: RequestReplay) -> None:
        if self._closed:
            return
        if effect.from_seq > 0:  # the gap may be a restart
            self._identify()
        life = self._worker.life
        if life is None or not life.answers or life.id != effect.worker:
            self._feed(ReplayUnavailable(effect.worker, effect.rank, "gone, silent, or another process"))
            return
        kept = {batch.seq: batch for batch in life.published if batch.seq >= effect.from_seq}
        part = self._weather.replay_part(tuple(kept))
        self._feed(ReplayArrived(effect.worker, effect.rank, tuple(kept[seq] for seq in part)))

    # --- identity and load -------------------------------------------------------------------------------------------

    def _identify(self) -> None:
        """Announces the life that is there now, and lets the batches go that waited for this."""
        life = self._worker.life
        if self._closed or life is None or not life.answers:
            return
        if self.known != life.id:
            self.known = life.id
            self._feed(WorkerJoined(life.id, self._worker.spec))
        held, self._held = self._held, []
        for batch in held:
            self._feed(batch)

    def _again(self, work: Callable[[], None]) -> None:
        self._agenda.after(self._interval_s * (1 - JITTER + 2 * JITTER * self._uniform()), work)

    def _probe(self) -> None:
        delay_s = self._weather.probe_s(self._agenda.now_s, self._worker.name)
        self._agenda.after(
            self._weather.question_s if delay_s is None else delay_s, lambda: self._probed(delay_s is not None)
        )

    def _probed(self, answered: bool) -> None:
        if self._closed:
            return
        ok = answered and self._answering() is not None
        if ok:
            self._identify()
        if self.known is not None:
            self._feed(ProbeAnswered(self.known, ok, "" if ok else "no answer"))
        self._again(self._probe)

    def _scrape(self) -> None:
        delay_s = self._weather.scrape_s(self._agenda.now_s, self._worker.name)
        if delay_s is None:
            self._again(self._scrape)
        else:
            self._agenda.after(delay_s, self._scraped)

    def _scraped(self) -> None:
        if self._closed:
            return
        life = self._answering()
        if life is not None:
            self._identify()
            self._feed(
                LoadReported(
                    life.id,
                    running_requests=life.engine.running_requests,
                    waiting_requests=life.engine.waiting_requests,
                    kv_usage_ratio=life.engine.kv_usage_ratio,
                )
            )
        self._again(self._scrape)

    def _answering(self) -> Life | None:
        life = self._worker.life
        return life if life is not None and life.answers else None
