"""What the two halves of the connector tell each other, once per engine step.

The scheduler's half knows requests and names; the worker's half knows memory. Everything here is plain data that can be
pickled from one process to the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.core.contract.identity import Namespace

HIT = "hit"


@dataclass(frozen=True)
class ChunkLoad:
    """One object to fetch and where its blocks go. None: that block is here already, or is not wanted."""

    key: bytes
    first_token: int
    block_ids: tuple[int | None, ...]
    places: tuple[int, ...]  # tiers that have it, by number

    @property
    def wanted_blocks(self) -> int:
        return sum(block is not None for block in self.block_ids)


@dataclass(frozen=True)
class Load:
    """All that is to be loaded for one request; its chunks follow each other."""

    request_id: str
    namespace: Namespace
    chunks: tuple[ChunkLoad, ...]
    ordered_s: float  # monotonic clock of the machine


@dataclass(frozen=True)
class Save:
    """One chunk whose blocks are complete after this step."""

    namespace: Namespace
    key: bytes
    first_token: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class StepOrders:
    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()


@dataclass
class LoadReport:
    """What came of one load on one rank. `chunks` counts leading chunks that were verified and copied."""

    chunks: int
    bytes_read: int
    ms: dict[str, float]
    outcome: str  # `hit`, or that of the first chunk that failed
    bytes_by_tier: dict[str, int] = field(default_factory=dict)
    ms_by_tier: dict[str, float] = field(default_factory=dict)
    scopes: list[str | None] = field(default_factory=list)  # per leading chunk

    def joined(self, other: LoadReport) -> LoadReport:
        """Of two ranks: only what all of them have can be used, and the slowest one was waited for."""
        worse = self if self.chunks <= other.chunks else other
        steps = {*self.ms, *other.ms}
        return LoadReport(
            chunks=worse.chunks,
            bytes_read=self.bytes_read + other.bytes_read,
            ms={step: max(self.ms.get(step, 0.0), other.ms.get(step, 0.0)) for step in steps},
            outcome=worse.outcome,
            bytes_by_tier=worse.bytes_by_tier,
            ms_by_tier=worse.ms_by_tier,
            scopes=worse.scopes,
        )


@dataclass
class StepReports:
    """Since the last step."""

    loads: dict[str, LoadReport] = field(default_factory=dict)
    saves: dict[str, int] = field(default_factory=dict)  # by outcome
    saved_bytes: int = 0
    unsaved: tuple[bytes, ...] = ()  # names of chunks that were to be saved and are not in the store
    faults: int = 0  # mistakes of ours that were caught before they reached the engine

    def joined(self, other: StepReports) -> StepReports:
        loads = dict(self.loads)
        for request_id, report in other.loads.items():
            loads[request_id] = loads[request_id].joined(report) if request_id in loads else report
        saves = dict(self.saves)
        for outcome, count in other.saves.items():
            saves[outcome] = saves.get(outcome, 0) + count
        return StepReports(
            loads,
            saves,
            self.saved_bytes + other.saved_bytes,
            self.unsaved + other.unsaved,
            self.faults + other.faults,
        )

    def __bool__(self) -> bool:
        return bool(self.loads or self.saves or self.faults)
