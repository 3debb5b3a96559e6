"""Workers come and go, answer probes, say what they do: each of these changes fleet, index, load and bindings together.

Nothing here is about one request; what is under way on a worker that is gone is hastened, and ends where requests end.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvrelay.core.load.ledger import Ledger
from kvrelay.core.model.effects import Effect, Hasten, Report, ReportKind
from kvrelay.core.model.events import (
    EpochRotated,
    EventsHeard,
    LoadReported,
    ProbeAnswered,
    ResidencyReset,
    WorkerJoined,
    WorkerSpec,
)
from kvrelay.core.model.ids import WorkerId
from kvrelay.core.routing.affinity import Affinity
from kvrelay.core.routing.epochs import Epochs
from kvrelay.core.routing.fleet import FleetView, Worker
from kvrelay.core.routing.health import Change, Health
from kvrelay.core.routing.keeper import Keeper
from kvrelay.core.routing.live import Live
from kvrelay.core.routing.settings import RouterSettings

Effects = tuple[Effect, ...]

_REPORT_OF: dict[Change, ReportKind] = {
    Change.WENT_UP: "worker_up",
    Change.WENT_DOWN: "worker_down",
    Change.SUSPENDED: "worker_suspended",
    Change.RECOVERED: "worker_recovered",
}


class Roster:
    """Takes what is told about workers. None for an event means that it came too late: that life has ended."""

    def __init__(
        self,
        settings: RouterSettings,
        *,
        epochs: Epochs,
        fleet: FleetView,
        keeper: Keeper,
        ledger: Ledger,
        affinity: Affinity,
        live: Mapping[str, Live],
    ) -> None:
        self._settings = settings
        self._epochs = epochs
        self._fleet = fleet
        self._keeper = keeper
        self._ledger = ledger
        self._affinity = affinity
        self._live = live  # the router's own, read only

    def change(self, settings: RouterSettings) -> None:
        """The operator decided anew how soon a worker is down and up, and how far away workers are."""
        self._settings = settings
        for worker in self._fleet.workers.values():
            worker.health.change(failures_to_down=settings.health_failures, successes_to_up=settings.health_successes)
        self._fleet.move(settings.place, settings.hops)

    def joined(self, now: float, event: WorkerJoined) -> Effects:
        """A life of a worker begins; whoever had its name before is gone."""
        known = self._fleet.workers.get(event.worker.name)
        if known is not None and known.id == event.worker:
            return ()
        replaced: Effects = ()
        if known is not None:
            self._forget(event.worker.name)
            replaced = (Report("worker_replaced", event.worker.name), *self._hasten(known.id))
        health = Health(
            failures_to_down=self._settings.health_failures, successes_to_up=self._settings.health_successes
        )
        targets = tuple(self._keeper.new_target(event.worker, rank, event.spec) for rank in range(event.spec.ranks))
        for target in targets:
            self._ledger.add_slot(target.slot)
        worker = Worker(event.worker, event.spec, health, targets)
        worker.draining = event.worker.name in self._fleet.drained
        worker.retired = self._epochs.joined(event.worker)
        self._fleet.add(worker)
        begun: Effects = ()
        for target in targets:
            begun += self._keeper.begin(now, target)
        broken = next((target.index_broken for target in targets if target.index_broken is not None), None)
        if broken is not None:
            begun += (Report("index_unusable", event.worker.name, broken), *self._keeper.all_unusable())
        return (*replaced, Report("worker_up", event.worker.name), *begun)

    def left(self, name: str) -> None:
        """It was taken off the fleet, and whatever the operator wanted of it is void."""
        self._fleet.drained.pop(name, None)
        self._forget(name)

    def _forget(self, name: str) -> None:
        """Wholly; requests still on it end by themselves and find nothing booked."""
        worker = self._fleet.remove(name)
        if worker is None:
            return
        for target in worker.targets:
            self._keeper.drop(target)
            self._ledger.drop_slot(target.slot)
        self._affinity.drop_worker(worker.id)
        self._keeper.forget_worker(name)

    def probed(self, now: float, event: ProbeAnswered) -> Effects | None:
        """It answered, or did not."""
        worker = self._fleet.live(event.worker)
        if worker is None:
            return None
        if not worker.health.up:
            self._fleet.changed()  # what was only suspected may be known now
        for target in worker.targets if event.ok else ():
            self._ledger.forget_old_rate(now, target.slot)
        was_dead = worker.health.dead
        reports = self.report_change(worker, worker.health.probed(event.ok), event.detail)
        return reports + self._hasten(worker.id) if worker.health.dead and not was_dead else reports

    def report_change(self, worker: Worker, change: Change, detail: str) -> Effects:
        """Says what has become of its health."""
        if change is Change.NONE:
            return ()
        self._fleet.changed()
        return (Report(_REPORT_OF[change], worker.id.name, detail),)

    def load_reported(self, event: LoadReported) -> Effects | None:
        """What it says itself of its queue."""
        target = self._fleet.target(event.worker, event.rank)
        if target is None:
            return None
        self._ledger.report(
            target.slot,
            running=event.running_requests,
            waiting=event.waiting_requests,
            kv_usage_ratio=event.kv_usage_ratio,
        )
        return ()

    def set_draining(self, name: str, draining: bool) -> None:
        """Of a worker that has yet to answer as well: it is drained when it does."""
        if draining:
            self._fleet.drained[name] = None
        else:
            self._fleet.drained.pop(name, None)
        worker = self._fleet.workers.get(name)
        if worker is not None:
            worker.draining = draining
            self._fleet.changed()

    def reset(self, now: float, event: ResidencyReset) -> Effects | None:
        """Its cache was emptied, or what is known of it is to be learned anew."""
        worker = self._fleet.workers.get(event.name)
        if worker is None:
            return None
        effects: Effects = ()
        for target in worker.targets:
            effects += self._keeper.reset(now, target, replay=event.replay)
        if not event.replay and self._epochs.emptied(worker.id):
            worker.retired = False
            self._fleet.changed()
        return effects

    def events_heard(self, event: EventsHeard) -> Effects | None:
        """Of a worker whose events do not come nothing can match."""
        worker = self._fleet.live(event.worker)
        if worker is None:
            return None
        return self._keeper.heard(worker, event.problem)

    def left_by(self, event: EpochRotated) -> tuple[str, ...]:
        """Names of the workers that could still take requests after this rotation."""
        retired = self._epochs.outdated(event, self._lives())
        return tuple(
            worker.id.name
            for worker in self._fleet.workers.values()
            if worker.id not in retired and not worker.leaving and worker.health.up
        )

    def rotate(self, event: EpochRotated) -> Effects:
        """One step: whoever arrives after it belongs to the new epoch, whoever came before stays in the old one."""
        retired = self._epochs.rotate(event, self._lives())
        for worker_id in retired:
            self._fleet.workers[worker_id.name].retired = True
        self._fleet.changed()
        whose = event.tenant or event.adapter
        named = event.trigger.value if whose is None else f"{event.trigger.value} of {whose}"
        rotated = Report("epoch_rotated", detail=named)
        return (rotated, *(Report("worker_retired", worker_id.name, named) for worker_id in retired))

    def _hasten(self, worker_id: WorkerId) -> Effects:
        """Whatever is still under way on a worker that is gone."""
        return tuple(
            Hasten(live.arrived.request_id, live.current.number)
            for live in self._live.values()
            if live.current is not None
            and live.current.fault is None
            and live.current.decision.target.worker == worker_id
        )

    def _lives(self) -> tuple[tuple[WorkerId, WorkerSpec], ...]:
        return tuple((worker.id, worker.spec) for worker in self._fleet.workers.values())
