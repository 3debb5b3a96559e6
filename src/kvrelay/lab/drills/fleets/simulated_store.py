"""The shared tier of a simulated fleet, in the words of actions: what `shared_store.py` is to processes."""

from __future__ import annotations

from kvrelay.core.tiers.effects import Fetch
from kvrelay.edge.stores.memory import MemoryStore
from kvrelay.edge.stores.runtime import Job
from kvrelay.lab.drills import actions as act
from kvrelay.lab.drills.drill import StorePlan
from kvrelay.lab.drills.fleets.shared_store import CHUNK_BLOCKS, READ_TAKES_S, store_options
from kvrelay.lab.drills.fleets.spoilt import SpoiltStore
from kvrelay.lab.sim.agenda import Action
from kvrelay.lab.sim.store import Place, SharedTiers
from kvrelay.lab.sim.worker import Life

StoreAction = act.StoreDown | act.StoreUp | act.SpoilStore | act.WipeStore | act.CountReads


class SimulatedStore:
    """`tiers.connect` is for the world."""

    def __init__(self, plan: StorePlan, *, seed: int) -> None:
        self.content = SpoiltStore()
        self._remote = Place(self.content, read_s=READ_TAKES_S)
        self._remote.on_job = self._sets_out
        places = [self._remote]
        if plan.below:
            places.append(Place(MemoryStore()))
        options = store_options(plan, remote_url="peer://store.sim:1", below_url="file:///sim/below")
        self.tiers = SharedTiers(options, places, chunk_blocks=CHUNK_BLOCKS, seed=seed)

    def _sets_out(self, life: Life, job: Job) -> Action | None:
        return self.content.read_begins(job.key) if isinstance(job, Fetch) else None

    def strike(self, action: StoreAction) -> None:
        match action:
            case act.StoreDown(how):
                self._remote.reach = how
            case act.StoreUp():
                self._remote.mend()
                self.content.how = None
            case act.SpoilStore(how):
                self.content.how = how
            case act.WipeStore():
                self.content.wipe()
            case act.CountReads():
                self.content.begin_counting()

    def leave_alone(self) -> None:
        """By every worker, as it runs now."""
        for connection in self.tiers.connections.values():
            connection.store.shares = False
