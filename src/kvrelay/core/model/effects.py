"""What the router asks its host to do. Imperative, frozen, and complete: a host decides nothing about routing."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from kvrelay.core.model.ids import WorkerId
from kvrelay.core.model.siblings import Placement
from kvrelay.core.model.units import RouteReason, Status
from kvrelay.core.receipts.receipt import Receipt


class Dispatch(Struct, frozen=True):
    """Send the request to this worker (and rank). Attempts count from 1."""

    request_id: str
    attempt: int
    worker: WorkerId
    rank: int | None  # None: the worker has a single rank, send no rank header
    matched_tokens: int | None
    reason: RouteReason
    continues: bool = False  # send what continues the client's broken stream, not the request as it came


class Refuse(Struct, frozen=True):
    """Answer the client ourselves: nobody could take the request. Nothing of a worker's answer is at hand."""

    request_id: str
    http_status: int
    reason: str
    retry_after_s: float | None = None


class PassThrough(Struct, frozen=True):
    """Give the client the failed attempt's own answer (its status, headers and body)."""

    request_id: str


class BreakOff(Struct, frozen=True):
    """The response had begun and cannot go on: end it so that the client sees it as broken."""

    request_id: str
    status: Status
    reason: str


class CancelAttempt(Struct, frozen=True):
    """Close the connection of this attempt: its client left."""

    request_id: str
    attempt: int


class Hasten(Struct, frozen=True):
    """Bear no long silence of this attempt any more: its worker is gone as far as probes can tell.

    It may be ending in good order, so what still comes of it is welcome; but a process that is being shut down can keep
    its connections open and never say another word.
    """

    request_id: str
    attempt: int


class RequestReplay(Struct, frozen=True):
    """Ask the worker for its event batches from `from_seq` on; answer with ReplayArrived or ReplayUnavailable."""

    worker: WorkerId
    rank: int
    from_seq: int


class RequestSnapshot(Struct, frozen=True):
    """Ask the worker's agent for all that it holds; answer with SnapshotArrived or SnapshotUnavailable."""

    worker: WorkerId
    rank: int


class WakeAt(Struct, frozen=True):
    """Send `WokeUp` at this time; a later WakeAt with an earlier time adds to it, it replaces nothing."""

    at: float


class WriteReceipt(Struct, frozen=True):
    """The request reached its one terminal status; this is its receipt."""

    receipt: Receipt


class ShareSession(Struct, frozen=True):
    """Tell the other processes of this gateway. Only asked for where there are any."""

    placement: Placement


ReportKind = Literal[
    "worker_up",
    "worker_down",
    "worker_replaced",
    "worker_suspended",
    "worker_recovered",
    "event_gap",
    "event_gap_lost",
    "event_tail_lost",
    "index_drift",
    "snapshot_restored",
    "event_duplicate",
    "event_late",
    "tail_drift",
    "index_unusable",
    "index_usable",
    "events_skipped",
    "orphans_dropped",
    "block_size_mismatch",
    "policy_switched",
    "epoch_rotated",
    "worker_retired",
]


class Report(Struct, frozen=True):
    """Something an operator should be able to see: a counter and a log line."""

    kind: ReportKind
    worker: str | None = None
    detail: str = ""
    count: int = 1


Effect = (
    Dispatch
    | Refuse
    | PassThrough
    | BreakOff
    | CancelAttempt
    | Hasten
    | RequestReplay
    | RequestSnapshot
    | WakeAt
    | WriteReceipt
    | ShareSession
    | Report
)
