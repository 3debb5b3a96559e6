"""What a drill is: what is sent, what is broken, what must hold. Values only; fleets carry it out, promises judge it.

The three do not know each other. Requests do not know that anything will break; actions judge nothing; promises see
what was written down and nothing else, so a drill cannot pass because its breaker believes that it did well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from kvrelay.lab.drills.actions import Action
from kvrelay.lab.drills.history import Finding, History
from kvrelay.lab.drills.prompts import Text


class Turn(Struct, frozen=True, kw_only=True):
    """One request of a client. Ids are unique within a drill."""

    id: str
    text: Text
    at_s: float = 0.0  # after its `Send` began
    session: str | None = None
    max_tokens: int = 4
    adapter: str | None = None
    tenant: str | None = None  # one of the setup's, by whose credential it is sent
    leaves_after_s: float | None = None


class Send(Struct, frozen=True):
    """All turns at their times, and blows among them; over when every turn has ended."""

    turns: tuple[Turn, ...]
    blows: tuple[tuple[float, Action], ...] = ()


class Do(Struct, frozen=True):
    action: Action


class Wait(Struct, frozen=True):
    """For whatever follows by itself: events, probes, timers. Drills expect a probe every `INTERVAL_S`."""

    seconds: float


class Settle(Struct, frozen=True):
    """Until the gateway would use these workers (None: all), or `within_s` are over; the history says which."""

    workers: tuple[str, ...] | None = None
    within_s: float = 20.0


class Look(Struct, frozen=True):
    """Write down how things stand, and for some texts what the gateway claims and what each worker really holds."""

    label: str
    texts: tuple[Text, ...] = ()


Step = Send | Do | Wait | Settle | Look

INTERVAL_S = 0.1


class WorkerPlan(Struct, frozen=True, kw_only=True):
    """A worker that is there from the start."""

    name: str
    revision: str = ""
    blocks: int = 1024
    max_active_requests: int = 0  # 0: no limit
    adapters: tuple[str, ...] = ()
    max_num_seqs: int = 64


class StorePlan(Struct, frozen=True, kw_only=True):
    """A tier that all workers share. `below`: a slower one under it, on disk, that a drill leaves alone."""

    failure_policy: Literal["recompute", "fail", "fallback"] = "recompute"
    below: bool = False


class Setup(Struct, frozen=True, kw_only=True):
    """The fleet that a drill wants. Fleets that are given (attached) are taken as they are."""

    workers: tuple[WorkerPlan, ...]
    policy: str = "cache_load"
    affinity_ttl_s: float | None = 300.0
    retry_attempts: int = 3
    retry_budget_ratio: float = 1.0  # drills are about attempts; with a smaller budget who exceeds it is refused
    queue_depth: int = 0
    queue_wait_s: float = 30.0
    first_byte_s: float = 10.0
    idle_s: float = 5.0
    prefill_tokens_per_s: float = 50_000.0
    decode_ms: float = 1.0
    receipts_on_full_disk: bool = False
    store: StorePlan | None = None
    tenants: tuple[str, ...] = ()  # with any, every turn needs one


def workers(count: int, *, prefix: str = "w", **members: object) -> tuple[WorkerPlan, ...]:
    """w0, w1, ... alike."""
    return tuple(WorkerPlan(name=f"{prefix}{number}", **members) for number in range(count))  # type: ignore[arg-type]


class Promise(Struct, frozen=True):
    """Something that must hold, and the function that says whether it did."""

    says: str
    judge: Callable[[History], Finding]


class Drill(Struct, frozen=True, kw_only=True):
    """`baseline`, `rollback`: what an operator makes sure of beforehand, and does when it goes wrong."""

    name: str
    title: str
    why: str
    breaks: str
    setup: Setup
    steps: tuple[Step, ...]
    promises: tuple[Promise, ...]
    covers: tuple[str, ...] = ()
    group: Literal["five", "modes", "more"] = "more"
    baseline: str = "The same requests, undisturbed, end well; every worker is routable and its index is live."
    rollback: str = "`kvrelay rollback`: round robin, without any shared tier; restart what the drill stopped."

    def afresh(self, by: int) -> Drill:
        """With prompts of its own, for fleets that outlive a drill: what another one left in their caches is no part
        of it."""
        return replace(self, steps=tuple(_afresh(step, by) for step in self.steps))

    def actions(self) -> tuple[Action, ...]:
        """All that is done in it, in order."""
        found: list[Action] = []
        for step in self.steps:
            match step:
                case Do(action):
                    found.append(action)
                case Send(_, blows):
                    found += [action for _, action in blows]
                case _:
                    pass
        return tuple(found)


def _afresh(step: Step, by: int) -> Step:
    match step:
        case Send(turns=turns):
            return replace(step, turns=tuple(replace(turn, text=turn.text.shifted(by)) for turn in turns))
        case Look(texts=texts):
            return replace(step, texts=tuple(text.shifted(by) for text in texts))
        case _:
            return step
