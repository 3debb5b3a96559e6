"""What a drill leaves behind: all that a judge may know.

None is not observed: a router of another make has no receipts, a real engine does not say what it holds. What was not
observed makes a promise unknown, never kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct, field

from kvrelay.core.receipts.receipt import Receipt

Verdict = Literal["pass", "fail", "unknown"]


class Finding(Struct, frozen=True):
    """One promise, looked at."""

    verdict: Verdict
    observed: str


def found(ok: bool | None, observed: str) -> Finding:
    return Finding("unknown" if ok is None else "pass" if ok else "fail", observed)


class Outcome(Struct, kw_only=True):
    """One turn and what came of it, as its client saw it; the gateway's receipt beside that."""

    id: str
    session: str | None
    tenant: str | None = None  # by whose credential it was sent
    step: int  # number of the `Send`, from 0
    prompt_tokens: int
    at_s: float  # when it was due, on the fleet's clock
    sent_s: float | None = None  # when it really was sent
    ended_s: float | None = None
    ending: Literal["ok", "refused", "broken", "left", "gateway_lost", "none"] = "none"
    http_status: int | None = None
    ttft_ms: float | None = None
    text: str | None = None
    texts: Mapping[str, str] = field(default_factory=dict)  # right ones, by revision; empty: not known
    worker: str | None = None
    life: str | None = None
    cached_tokens: int | None = None
    wrong_reuse_blocks: int | None = None
    receipt: Receipt | None = None
    receipts: int | None = None  # how many there are of it


class Deed(Struct, frozen=True, kw_only=True):
    """Something that was done to the fleet. `life`: the worker's process at that time, where it is known."""

    at_s: float  # when it began
    done_s: float  # and was over, or answered
    action: str
    kind: str
    worker: str | None = None
    life: str | None = None
    detail: str = ""


class WorkerView(Struct, frozen=True, kw_only=True):
    """A worker as the gateway sees it."""

    name: str
    life: str | None = None
    routable: bool = False
    index_state: str | None = None
    index_blocks: int | None = None
    active_requests: int | None = None
    next_event_seq: int | None = None


class Held(Struct, frozen=True, kw_only=True):
    """Of one text on one worker, in tokens: what is claimed, and what is there."""

    text: int  # number of the text in its `Look`
    worker: str
    claimed: int | None = None
    real: int | None = None


class View(Struct, frozen=True, kw_only=True):
    """How things stood at one moment."""

    label: str
    at_s: float
    workers: tuple[WorkerView, ...] = ()
    live_requests: int | None = None
    index_blocks: int | None = None
    held: tuple[Held, ...] = ()
    policy: str | None = None
    store: Mapping[str, int] | None = None  # objects; reads, most at once, most of one object
    reports: Mapping[str, int] | None = None  # totals so far, by kind

    def worker(self, name: str) -> WorkerView | None:
        return next((worker for worker in self.workers if worker.name == name), None)


class Settled(Struct, frozen=True):
    """How long it took until the gateway used the workers; None: not within the limit."""

    after_s: float | None
    wanted: tuple[str, ...]


class History(Struct, kw_only=True):
    """One drill on one fleet."""

    drill: str
    fleet: str
    block_size_tokens: int = 16
    retry_attempts: int | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    deeds: list[Deed] = field(default_factory=list)
    views: list[View] = field(default_factory=list)
    settled: list[Settled] = field(default_factory=list)
    receipts_dropped: int | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    def of_step(self, step: int) -> Sequence[Outcome]:
        """The turns of the step-th `Send`."""
        return [outcome for outcome in self.outcomes if outcome.step == step]

    def outcome(self, turn: str) -> Outcome:
        return next(outcome for outcome in self.outcomes if outcome.id == turn)

    def view(self, label: str) -> View:
        return next(view for view in self.views if view.label == label)

    def deed(self, kind: str) -> Deed:
        return next(deed for deed in self.deeds if deed.kind == kind)
