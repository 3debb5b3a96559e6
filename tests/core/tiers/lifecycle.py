"""The life of KV through the tiers as a table of legal steps, and a world that holds the machine to it.

    out    allocate -> write -> written -> verify -> verified (-> write, for the next piece) -> publish
    back   select -> transfer -> ready -> decode

A life may end after any step but the last (`dropped`: nothing of it is offered; `computed`: the engine does without);
it never skips one, and never takes one twice. A key is published in a tier only by a save or a copy that got there.
"""

from __future__ import annotations

from collections import Counter

from kvrelay.core.tiers.effects import Announce, Check, Copy, Fetch, LoadFinished, SaveFinished, TierEffect, Write
from kvrelay.core.tiers.events import Checked, Fetched, LoadAsked, SaveAsked, TierEvent, Transferred, Written
from kvrelay.core.tiers.outcome import Outcome
from kvrelay.core.tiers.settings import TiersSettings
from tests.core.tiers.world import BAD, Job, World

OUT = {
    "": {"allocate"},
    "allocate": {"write", "dropped"},
    "write": {"written", "dropped"},
    "written": {"verify"},
    "verify": {"verified", "dropped"},
    "verified": {"write", "publish", "dropped"},
    "publish": set(),
    "dropped": set(),
}
BACK = {
    "": {"select"},
    "select": {"transfer", "computed"},
    "transfer": {"transfer", "ready", "computed"},
    "ready": {"decode"},
    "decode": set(),
    "computed": set(),
}
Life = tuple[str, int, int]  # "out", save, tier; "back", load, position


class WatchedWorld(World):
    """Asserts at every step. `taken` counts the steps of all lives."""

    def __init__(self, settings: TiersSettings, *, pieces: int = 1) -> None:
        self.taken: Counter[str] = Counter()
        super().__init__(settings, pieces=pieces)

    def start(self) -> None:
        """What a failed write of a process that has died left behind is damage: its readers find that, not the next
        writer, who sees that the name is taken."""
        self.damaged |= {key for store in self.stores for key, pieces in store.items() if BAD in pieces.values()}
        self.at: dict[Life, str] = {}
        self._pieces_verified: Counter[Life] = Counter()
        self._copied: Counter[tuple[int, bytes]] = Counter()
        super().start()

    def go(self, life: Life, step: str) -> None:
        before = self.at.get(life, "")
        legal = (OUT if life[0] == "out" else BACK)[before]
        assert step in legal, f"{life} goes from {before or 'nothing'} to {step}; legal: {sorted(legal)}"
        self.at[life] = step
        self.taken[step] += 1

    def _ask(self, kind: str, number: int, event: TierEvent) -> None:
        match event:
            case SaveAsked():
                for tier in range(len(self.stores)):
                    self.go(("out", number, tier), "allocate")
            case LoadAsked():
                for position in range(len(event.keys)):
                    self.go(("back", number, position), "select")
        super()._ask(kind, number, event)

    def _answer(self, job: Job, fault: Outcome | None) -> TierEvent:
        event = super()._answer(job, fault)
        match job, event:
            case Write(), Written(outcome=Outcome.STORED):
                self.go(("out", job.save, job.tier), "written")
            case Check(), Checked(outcome=Outcome.HIT):
                self.go(("out", job.save, job.tier), "verified")
                self._pieces_verified["out", job.save, job.tier] += 1
            case Fetch(load=int(load)), Fetched(outcome=Outcome.HIT):
                self.go(("back", load, job.position), "ready")
            case _, Transferred(outcome=Outcome.STORED):
                self._copied[job.target, job.key] += 1  # type: ignore[union-attr]
        return event

    def _act(self, effect: TierEffect) -> None:
        match effect:
            case Write():
                self.go(("out", effect.save, effect.tier), "write")
                verified = self._pieces_verified["out", effect.save, effect.tier]
                assert effect.piece == verified, f"piece {effect.piece} is written after {verified} verified ones"
            case Check():
                self.go(("out", effect.save, effect.tier), "verify")
            case Fetch(load=int(load)):
                self.go(("back", load, effect.position), "transfer")
            case Copy():
                target = ("back", effect.load, effect.position)
                if self.at[target] == "select":  # it waited for somebody else's flight
                    self.go(target, "transfer")
                self.go(target, "ready")
            case LoadFinished():
                for position, outcome in enumerate(effect.outcomes):
                    self.go(("back", effect.load, position), "decode" if outcome is Outcome.HIT else "computed")
            case Announce():
                self._published(effect.tier, effect.key)
            case SaveFinished():
                for tier, outcome in enumerate(effect.outcomes):
                    life = ("out", effect.save, tier)
                    assert (self.at[life] == "publish") == (outcome is Outcome.STORED), (life, self.at[life], outcome)
        super()._act(effect)

    def _published(self, tier: int, key: bytes) -> None:
        """By the save that is verified, or by a copy."""
        for number, asked in self.asked["save"].items():
            life = ("out", number, tier)
            whole = self._pieces_verified[life] == (self.pieces + 1 if self.pieces > 1 else 1)
            if isinstance(asked, SaveAsked) and asked.key == key and self.at[life] == "verified" and whole:
                self.go(life, "publish")
                return
        self._copied[tier, key] -= 1
        assert self._copied[tier, key] >= 0, f"{key!r} is published in tier {tier}, and nobody brought it there"
        self.taken["publish"] += 1
