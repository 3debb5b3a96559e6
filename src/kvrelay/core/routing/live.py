"""What the router remembers of a request from its arrival to its receipt."""

from __future__ import annotations

from msgspec import Struct

from kvrelay.core.index.matches import Matches
from kvrelay.core.load.growth import Conversation
from kvrelay.core.model.events import RequestArrived
from kvrelay.core.model.ids import TargetId
from kvrelay.core.model.units import Fault, IndexState
from kvrelay.core.policy.policy import Choice, Field
from kvrelay.core.routing.affinity import Session
from kvrelay.core.routing.fleet import Target


class Decision(Struct, frozen=True, eq=False):
    """The state of belief at one decision, kept as it was; the receipt is built from it and from nothing newer."""

    policy: str  # that decided; a switch afterwards does not rewrite history
    field: Field
    choice: Choice
    at: int  # position of the chosen slot in the field
    target: TargetId
    slot: int
    engine: str
    models_payload: bool | None
    index_state: IndexState
    matches: Matches | None  # by slot; the deepest of them all is what the fleet could have offered
    chosen_load: tuple[int, ...]  # as `ledger.KINDS`
    chosen_rate: float  # learned prefill tokens per second
    claimed_tokens: int  # what the chosen worker was believed to be able to reuse, from all tiers
    continues: Conversation | None  # None: the prompt was the first of a conversation, as far as anybody can tell
    load_version: int
    targets: list[Target | None]  # by slot, as the fleet was

    @property
    def binds(self) -> bool:
        """Whether the session is to be bound to the chosen worker: not by a mere excursion."""
        return self.choice.spilled_from is None and self.field.bound.away_from is None


class Attempted(Struct):
    """One attempt as it goes on."""

    number: int
    decision: Decision
    started_at: float
    last_resort: bool = False
    continues: bool = False  # the stream that another attempt began
    accepted: bool = False
    fault: Fault | None = None
    http_status: int | None = None
    detail: str | None = None


class Live:
    """One request between arrival and terminal status."""

    __slots__ = (
        "arrived",
        "arrived_at",
        "attempts",
        "current",
        "decision_us",
        "due_at",
        "first_token_at",
        "generated_tokens",
        "not_migrated_because",
        "not_retried_because",
        "over_deadline_ms",
        "session",
        "waited_s",
    )

    def __init__(self, arrived: RequestArrived, arrived_at: float, session: Session | None) -> None:
        self.arrived = arrived
        self.arrived_at = arrived_at
        self.session = session
        self.attempts: list[Attempted] = []
        self.current: Attempted | None = None
        """The last one of them."""
        self.decision_us: float | None = None
        self.first_token_at: float | None = None
        self.due_at = None if arrived.deadline_ms is None else arrived_at + arrived.deadline_ms / 1000.0
        """When its first token is of no use any more."""
        self.over_deadline_ms: dict[str, float] = {}
        """Workers that were passed over as too slow for that, with the time until the first token expected there."""
        self.waited_s = 0.0  # in the admission queue
        self.generated_tokens = 0  # of the answer, before the current attempt
        self.not_migrated_because: str | None = None
        self.not_retried_because: str | None = None

    def begin(self, attempted: Attempted) -> None:
        self.attempts.append(attempted)
        self.current = attempted
