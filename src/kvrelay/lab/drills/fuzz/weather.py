"""The weather of a fuzzed fleet; it also writes down what every life of a worker has ever published."""

from __future__ import annotations

from msgspec import Struct

from kvrelay.core.model.effects import Dispatch, RequestReplay
from kvrelay.core.model.events import BlocksStored, KvEvent
from kvrelay.core.model.ids import WorkerId
from kvrelay.core.model.units import Fault
from kvrelay.lab.drills.fleets.weather import BrokenWeather
from kvrelay.lab.sim.weather import BrokenOff, Carried, Fate, Silent


class _Blow(Struct):
    """What happens to the next attempt at a worker."""

    after_tokens: int
    silent: bool


class FuzzWeather(BrokenWeather):
    """`published[life]` has the names of all blocks that the life announced, lost announcements included."""

    def __init__(self) -> None:
        super().__init__()
        self.next_attempt: dict[str, _Blow] = {}
        self.replay_keeps: dict[str, int] = {}
        self.published: dict[WorkerId, set[int]] = {}

    def strike_next(self, name: str, after_tokens: int, *, silent: bool) -> None:
        self.next_attempt[name] = _Blow(after_tokens, silent)

    def attempt(self, now_s: float, dispatch: Dispatch) -> Fate:
        fate = super().attempt(now_s, dispatch)
        blow = self.next_attempt.get(dispatch.worker.name)
        if blow is None or not isinstance(fate, Carried):
            return fate
        del self.next_attempt[dispatch.worker.name]
        if blow.silent:
            return Silent(blow.after_tokens, fate)
        return BrokenOff(blow.after_tokens, Fault.RESET, fate)

    def deliveries_s(self, now_s: float, worker: WorkerId, seq: int, events: tuple[KvEvent, ...]) -> tuple[float, ...]:
        names = self.published.setdefault(worker, set())
        for event in events:
            if isinstance(event, BlocksStored):
                names.update(event.hashes)
        return super().deliveries_s(now_s, worker, seq, events)

    def replay_s(self, now_s: float, effect: RequestReplay) -> float | None:
        return super().replay_s(now_s, effect)

    def replay_part(self, seqs: tuple[int, ...]) -> tuple[int, ...]:
        """One setting for all workers: the question does not say who is asked."""
        if not self.replay_keeps:
            return seqs
        kept = min(self.replay_keeps.values())
        return seqs[len(seqs) - kept :] if kept else ()

    def heal(self) -> None:
        """Calm from now on; what is on its way arrives."""
        self.cut_off.clear()
        self.slower_s.clear()
        self.refusals.clear()
        self.calm_events()
        self.next_attempt.clear()

    def calm_events(self) -> None:
        for each in (self.lost_batches, self.replay_keeps):
            each.clear()
        for broken in (self.doubled, self.shuffled, self.no_replay):
            broken.clear()
