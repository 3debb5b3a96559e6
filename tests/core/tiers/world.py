"""A naive world around the tier machine: stores are dicts, and every job waits until the test says how it ends.

It knows what is really where, so it can say what the machine must never claim.
"""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.core.tiers.effects import (
    Announce,
    Check,
    Copy,
    Fetch,
    LoadFinished,
    LookupAnswered,
    Ping,
    Probe,
    RemovalFinished,
    Remove,
    SaveFinished,
    TierEffect,
    Transfer,
    WakeAt,
    Write,
)
from kvrelay.core.tiers.events import (
    Checked,
    Fetched,
    LoadAsked,
    LookupAsked,
    ObjectsFound,
    Pinged,
    Probed,
    RemovalAsked,
    Removed,
    SaveAsked,
    TierEvent,
    Transferred,
    WarmAsked,
    Woke,
    Written,
)
from kvrelay.core.tiers.machine import TierMachine
from kvrelay.core.tiers.outcome import Outcome
from kvrelay.core.tiers.settings import TiersSettings

Job = Probe | Fetch | Write | Check | Remove | Transfer | Ping
Place = tuple[int, int]  # load, position
CHUNK_BYTES = 10
GOOD, BAD = "good", "bad"
MANIFEST = -1


class World:
    """One machine and what it acts upon. `stores[tier][key]` maps pieces to good or bad; a chunk can be read when all
    of its pieces and, if there are several, its manifest are there."""

    def __init__(self, settings: TiersSettings, *, pieces: int = 1) -> None:
        self.settings = settings
        self.pieces = pieces
        self.now_s = 0.0
        self.stores: list[dict[bytes, dict[int, str]]] = [{} for _ in settings.tiers]
        self.lives = 0
        self.start()

    def start(self) -> None:
        """A new process over the same stores; what the old one was doing is lost in mid-air."""
        self.machine = TierMachine(self.settings, seed=self.lives)
        self.lives += 1
        self.jobs: dict[int, Job] = {}
        self.wake_at_s: float | None = None
        self.asked: dict[str, dict[int, TierEvent]] = {"lookup": {}, "load": {}, "save": {}, "removal": {}}
        self.filled: set[Place] = set()
        self.plans: list[LookupAnswered] = []
        self.plan_keys: dict[int, tuple[bytes, ...]] = {}
        self.loads: list[tuple[LoadAsked, LoadFinished]] = []
        self.saves: list[SaveFinished] = []
        self.removals: list[RemovalFinished] = []
        self.announced: list[Announce] = []
        self.deleted: set[bytes] = set()
        for tier in range(len(self.stores)):
            found = tuple((key, CHUNK_BYTES, 0.0) for key in self.stores[tier])
            self.post(ObjectsFound(tier, found))

    # --- what is true ------------------------------------------------------------------------------------------------

    def there(self, tier: int, key: bytes) -> bool:
        """What a look-up in the store says: the chunk's own name is taken."""
        return (MANIFEST if self.pieces > 1 else 0) in self.stores[tier].get(key, {})

    def sound(self, tier: int, key: bytes) -> bool:
        found = self.stores[tier].get(key, {})
        wanted = {*range(self.pieces)} | ({MANIFEST} if self.pieces > 1 else set())
        return wanted <= found.keys() and all(found[piece] == GOOD for piece in wanted)

    def used_bytes(self, tier: int) -> int:
        return CHUNK_BYTES * len(self.stores[tier])

    # --- asking ------------------------------------------------------------------------------------------------------

    def lookup(self, number: int, keys: tuple[bytes, ...], *, deadline_s: float = 1.0) -> None:
        self.plan_keys[number] = keys
        self._ask("lookup", number, LookupAsked(number, keys, CHUNK_BYTES, 16, self.now_s + deadline_s))

    def load(self, number: int, keys: tuple[bytes, ...], places: tuple[tuple[int, ...], ...]) -> None:
        self._ask("load", number, LoadAsked(number, keys, places, self.now_s + 1.0))

    def save(self, number: int, key: bytes) -> None:
        self.deleted.discard(key)
        self._ask("save", number, SaveAsked(number, key, CHUNK_BYTES, self.pieces))

    def remove(self, number: int, keys: tuple[bytes, ...]) -> None:
        self.deleted |= set(keys)
        self._ask("removal", number, RemovalAsked(number, keys, "test"))

    def warm(self, keys: tuple[bytes, ...]) -> None:
        self.deleted -= set(keys)
        self.post(WarmAsked(keys, CHUNK_BYTES))

    def _ask(self, kind: str, number: int, event: TierEvent) -> None:
        self.asked[kind][number] = event
        self.post(event)

    def wait(self, seconds: float) -> None:
        """Time passes; the machine is woken whenever it asked to be."""
        until_s, wakes = self.now_s + seconds, 0
        while self.wake_at_s is not None and self.wake_at_s <= until_s:
            self.now_s = max(self.now_s, self.wake_at_s)
            self.wake_at_s = None
            self.post(Woke())
            wakes += 1
            assert wakes < 1000, "the machine wants to be woken again and again"
        self.now_s = until_s

    # --- how jobs end ------------------------------------------------------------------------------------------------

    def end(self, number: int, fault: Outcome | None = None) -> None:
        """A job ends: honestly, or with a fault (a write may have left a part)."""
        job = self.jobs.pop(number)
        self.post(self._answer(job, fault))

    def drain(self) -> None:
        """Everything under way ends honestly."""
        ended = 0
        while self.jobs:
            self.end(min(self.jobs))
            ended += 1
            assert ended < 1000, f"there is always more to do: {list(self.jobs.values())}"

    def _answer(self, job: Job, fault: Outcome | None) -> TierEvent:
        match job:
            case Probe():
                present = tuple(self.there(job.tier, key) for key in job.keys)
                return Probed(job.job, present) if fault is None else Probed(job.job, None, fault)
            case Fetch():
                return self._fetch(job, fault)
            case Write():
                return self._write(job, fault)
            case Check():
                kept = self.stores[job.tier].get(job.key, {})
                return Checked(job.job, fault or (Outcome.HIT if self._piece(job) in kept else Outcome.PARTIAL))
            case Remove():
                gone = 0
                for key in job.keys:
                    gone += fault is None and self.stores[job.tier].pop(key, None) is not None
                return Removed(job.job, gone, fault or Outcome.HIT)
            case Transfer():
                return self._transfer(job, fault)
            case Ping():
                return Pinged(job.job, fault is None)

    def _fetch(self, job: Fetch, fault: Outcome | None) -> Fetched:
        if fault is not None:
            return Fetched(job.job, fault)
        if not self.there(job.tier, job.key):
            return Fetched(job.job, Outcome.MISS)
        if not self.sound(job.tier, job.key):
            return Fetched(job.job, Outcome.CORRUPT)
        if job.load is not None:
            if job.load not in self.asked["load"]:
                return Fetched(job.job, Outcome.SKIPPED)
            self.filled.add((job.load, job.position))
        return Fetched(job.job, Outcome.HIT, CHUNK_BYTES)

    def _write(self, job: Write, fault: Outcome | None) -> Written:
        kept = self.stores[job.tier].setdefault(job.key, {})
        if fault is Outcome.PARTIAL:  # the store says that it is done, and kept nothing
            self._tidy(job.tier, job.key)
            return Written(job.job, Outcome.STORED)
        if fault is not None:
            if fault is not Outcome.NO_SPACE:
                kept.setdefault(self._piece(job), BAD)
            self._tidy(job.tier, job.key)
            return Written(job.job, fault)
        existed = self._piece(job) in kept
        kept.setdefault(self._piece(job), GOOD)
        return Written(job.job, Outcome.STORED, existed)

    def _transfer(self, job: Transfer, fault: Outcome | None) -> Transferred:
        if fault is not None:
            return Transferred(job.job, fault)
        if not self.sound(job.source, job.key):
            return Transferred(job.job, Outcome.MISS)
        self.stores[job.target][job.key] = dict(self.stores[job.source][job.key])
        return Transferred(job.job, Outcome.STORED, CHUNK_BYTES)

    def _piece(self, job: Write | Check) -> int:
        return MANIFEST if self.pieces > 1 and job.piece == self.pieces else job.piece

    def _tidy(self, tier: int, key: bytes) -> None:
        if not self.stores[tier].get(key, {0: GOOD}):
            del self.stores[tier][key]

    # --- what the machine wants --------------------------------------------------------------------------------------

    def post(self, event: TierEvent) -> None:
        for effect in self.machine.step(self.now_s, event):
            self._act(effect)
        self.machine.check()

    def _act(self, effect: TierEffect) -> None:
        match effect:
            case Probe() | Fetch() | Write() | Check() | Remove() | Transfer() | Ping():
                assert effect.job not in self.jobs
                self.jobs[effect.job] = effect
            case LookupAnswered():
                del self.asked["lookup"][effect.lookup]
                self.plans.append(effect)
            case Copy():
                source, target = (effect.source_load, effect.source_position), (effect.load, effect.position)
                assert source in self.filled, "a copy of what is not there"
                assert source[0] in self.asked["load"] and target[0] in self.asked["load"], "a copy after the end"
                self.filled.add(target)
            case LoadFinished():
                self._finish_load(effect)
            case SaveFinished():
                self._once("save", effect.save)
                self.saves.append(effect)
            case RemovalFinished():
                self._once("removal", effect.removal)
                self.removals.append(effect)
            case Announce():
                assert self.sound(effect.tier, effect.key) or effect.key in self.damaged, f"{effect} is not whole"
                self.announced.append(effect)
            case WakeAt():
                self.wake_at_s = effect.at_s

    def _finish_load(self, effect: LoadFinished) -> None:
        asked = self._once("load", effect.load)
        assert isinstance(asked, LoadAsked) and len(effect.outcomes) == len(asked.keys)
        for position, outcome in enumerate(effect.outcomes):
            assert (outcome is Outcome.HIT) == ((effect.load, position) in self.filled), (
                f"load {effect.load}, key {position}: {outcome}, bytes there: {(effect.load, position) in self.filled}"
            )
        self.loads.append((asked, effect))

    def _once(self, kind: str, number: int) -> TierEvent:
        assert number in self.asked[kind], f"{kind} {number} ends twice, or was never asked"
        return self.asked[kind].pop(number)

    # --- behind the machine's back -----------------------------------------------------------------------------------

    damaged: frozenset[bytes] = frozenset()

    def vanish(self, tier: int, key: bytes) -> None:
        self.stores[tier].pop(key, None)
        self.damaged |= {key}

    def damage(self, tier: int, key: bytes) -> None:
        if key in self.stores[tier]:
            self.stores[tier][key] = dict.fromkeys(self.stores[tier][key], BAD)
            self.damaged |= {key}


def running(world: World, kind: type, where: Callable[[Job], bool] = lambda job: True) -> list[Job]:
    """Jobs of a kind that are under way."""
    return [job for job in world.jobs.values() if isinstance(job, kind) and where(job)]
