"""The agent beside one worker, as a machine: it follows the worker's events and can say at any time what it holds.

Its difference to a router is what it keeps (`replica.py`: blocks with their tokens, for anybody) and that it has
nobody to ask but the worker's replay: what that cannot fill makes it not whole, and it says so.

Nobody's heartbeat tells an agent that it lost the last event itself. So it asks the worker now and then for what
follows the last one, which costs next to nothing on the same host.
"""

from __future__ import annotations

from collections.abc import Sequence as Batches

from msgspec import Struct

from kvrelay.core.index.replica import Replica
from kvrelay.core.index.sequence import Apply, AskReplay, Empty, Phase, Sequence, Verdict
from kvrelay.core.model.census import Census
from kvrelay.core.model.effects import RequestReplay
from kvrelay.core.model.events import (
    BlocksStored,
    Event,
    KvBatch,
    ProbeAnswered,
    ReplayArrived,
    ReplayUnavailable,
    WorkerJoined,
)
from kvrelay.core.model.ids import WorkerId
from kvrelay.core.model.units import IndexState

MAX_PENDING_BATCHES = 10_000
CHECKS_LEFT_OUT = 20  # after one that the worker did not answer: events wait while an answer is awaited


class RankState(Struct, frozen=True):
    """What a heartbeat says of one rank. `last_seq` is -1 as long as nothing was published."""

    rank: int
    last_seq: int
    census: Census
    whole: bool


class _Rank:
    def __init__(self, max_blocks: int) -> None:
        self.sequence = Sequence(max_pending_batches=MAX_PENDING_BATCHES)
        self.replica = Replica(max_blocks=max_blocks)
        self.left_out_checks = 0


class Agent:
    """`step` takes what a fleet of this one worker feeds, and answers which replays to ask for."""

    def __init__(self, *, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._ranks: list[_Rank] = []
        self.worker: WorkerId | None = None
        self.worker_up = False

    def step(self, event: Event) -> tuple[RequestReplay, ...]:
        match event:
            case WorkerJoined():
                return self._joined(event)
            case ProbeAnswered():
                self.worker_up = event.ok
                return ()
            case KvBatch():
                rank = self._rank(event)
                return () if rank is None else self._follow(rank, event.rank, rank.sequence.offer(event))
            case ReplayArrived():
                rank = self._rank(event)
                return () if rank is None else self._follow(rank, event.rank, rank.sequence.replayed(event.batches))
            case ReplayUnavailable():
                rank = self._rank(event)
                if rank is None:
                    return ()
                rank.left_out_checks = CHECKS_LEFT_OUT
                return self._follow(rank, event.rank, rank.sequence.unavailable(Phase.REPLAYING))
            case _:
                return ()

    def check_tails(self) -> tuple[RequestReplay, ...]:
        """To be called now and then: asks for what follows the last event, of each rank that answers such questions."""
        asked: tuple[RequestReplay, ...] = ()
        for number, rank in enumerate(self._ranks):
            if rank.left_out_checks:
                rank.left_out_checks -= 1
            else:
                asked += self._follow(rank, number, rank.sequence.check_tail())
        return asked

    def ranks(self) -> tuple[RankState, ...]:
        return tuple(
            RankState(number, rank.sequence.next_seq - 1, rank.replica.census(), self._whole(rank))
            for number, rank in enumerate(self._ranks)
        )

    def snapshot(self, rank: int) -> Batches[BlocksStored]:
        """Empty for a rank that the worker does not have."""
        return tuple(self._ranks[rank].replica.snapshot()) if 0 <= rank < len(self._ranks) else ()

    def _joined(self, event: WorkerJoined) -> tuple[RequestReplay, ...]:
        self.worker, self.worker_up = event.worker, True
        self._ranks = [_Rank(self._max_blocks) for _ in range(event.spec.ranks)]
        begun: tuple[RequestReplay, ...] = ()
        for number, rank in enumerate(self._ranks):
            begun += self._follow(rank, number, rank.sequence.begin())
        return begun

    def _rank(self, event: KvBatch | ReplayArrived | ReplayUnavailable) -> _Rank | None:
        """None for what a former life of the worker had to say, and for ranks that it did not speak of."""
        known = event.worker == self.worker and 0 <= event.rank < len(self._ranks)
        return self._ranks[event.rank] if known else None

    def _follow(self, rank: _Rank, number: int, verdicts: tuple[Verdict, ...]) -> tuple[RequestReplay, ...]:
        asked: list[RequestReplay] = []
        for verdict in verdicts:
            match verdict:
                case Apply():
                    for event in verdict.batch.events:
                        rank.replica.apply(event)
                case Empty():
                    rank.replica.clear()
                case AskReplay():
                    assert self.worker is not None
                    asked.append(RequestReplay(self.worker, number, verdict.from_seq))
                case _:
                    pass  # a repeated batch; an agent has no agent to ask
        return tuple(asked)

    def _whole(self, rank: _Rank) -> bool:
        return rank.sequence.state is IndexState.LIVE and not rank.replica.overflowed
