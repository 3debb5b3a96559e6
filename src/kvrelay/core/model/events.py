"""What happened, in the past tense: the only input of `Router.step`.

A host (the gateway, the simulator, a drill) turns sockets, timers and files into these values. Times are seconds of one
monotonic clock and are passed beside the event, never inside it.
"""

from __future__ import annotations

from msgspec import Struct

from kvrelay.core.model.census import Census
from kvrelay.core.model.ids import WorkerId
from kvrelay.core.model.place import Place
from kvrelay.core.model.prompt import Prompt, Tenant, TokenIds, Usage
from kvrelay.core.model.siblings import Placement, SiblingLoad
from kvrelay.core.model.units import Fault, Tier, Trigger
from kvrelay.core.routing.settings import RouterSettings

# --- the fleet ---------------------------------------------------------------------------------------------------


class WorkerSpec(Struct, frozen=True):
    """What a worker said of itself at registration. Nothing in here is assumed by the router."""

    url: str
    models: tuple[str, ...] = ()  # base model names it answers to; empty means any
    adapters: tuple[str, ...] = ()  # adapter (LoRA) names it has loaded
    block_size_tokens: int | None = None  # None: unknown, so cache scoring is off for it
    ranks: int = 1  # data-parallel ranks that publish and can be addressed separately
    role: str = "both"  # both | prefill | decode
    max_active_requests: int | None = None
    place: Place = Place()
    sends_events: bool = True
    has_agent: bool = False  # beside it, somebody keeps a snapshot of what it holds
    sends_usage: bool = True
    keeps_whole_prompts: bool = False  # not blocks: a prompt that forks from another takes the place of its rest
    engine: str = "unknown"
    models_payload: bool | None = None  # False for mocks: no KV tensor is modelled
    separates_salts: bool = True  # requests with different cache salts never share KV in it


class WorkerJoined(Struct, frozen=True):
    """A worker registered, or came back as a new incarnation (which starts with an empty residency)."""

    worker: WorkerId
    spec: WorkerSpec


class WorkerLeft(Struct, frozen=True):
    """An operator or discovery removed the worker. Everything known of it is forgotten."""

    name: str


class ProbeAnswered(Struct, frozen=True):
    """One health probe ended."""

    worker: WorkerId
    ok: bool
    detail: str = ""


class LoadReported(Struct, frozen=True):
    """Gauges scraped from a worker; None for a gauge it does not have (unavailable is not zero)."""

    worker: WorkerId
    rank: int = 0
    running_requests: int | None = None
    waiting_requests: int | None = None
    kv_usage_ratio: float | None = None


class WorkerDrained(Struct, frozen=True):
    """An operator asked that the worker gets no new requests."""

    name: str


class WorkerResumed(Struct, frozen=True):
    """An operator put a drained worker back."""

    name: str


# --- KV events ---------------------------------------------------------------------------------------------------


class BlocksStored(Struct, frozen=True, eq=False):
    """A chain of blocks became reusable on a worker.

    `hashes` are the engine's own names (only ever compared within one worker); `token_ids` has
    `len(hashes) * block_size_tokens` entries, or is None when the engine announces a copy in another tier without
    tokens.
    """

    hashes: tuple[int, ...]
    parent: int | None
    token_ids: TokenIds | None
    block_size_tokens: int
    adapter: str | None = None
    salt: str | None = None
    media: tuple[str | None, ...] | None = None  # per block: digest of multimodal input that lies in it
    tier: Tier = Tier.GPU


class BlocksRemoved(Struct, frozen=True):
    """One copy of each hash is gone from the tier."""

    hashes: tuple[int, ...]
    tier: Tier = Tier.GPU


class BlocksCleared(Struct, frozen=True):
    """Everything is gone from one tier, or from all of them (`tier=None`)."""

    tier: Tier | None = None


class EventsSkipped(Struct, frozen=True):
    """Events that the decoder understood well enough to ignore (another cache group, say); they are counted."""

    kind: str
    count: int = 1


KvEvent = BlocksStored | BlocksRemoved | BlocksCleared | EventsSkipped


class KvBatch(Struct, frozen=True, eq=False):
    """One message of a worker's event stream: `seq` counts from 0 per incarnation and rank."""

    worker: WorkerId
    rank: int
    seq: int
    events: tuple[KvEvent, ...]


class ReplayArrived(Struct, frozen=True, eq=False):
    """The answer to `RequestReplay`: what the worker still had, oldest first, from the sequence asked for or later."""

    worker: WorkerId
    rank: int
    batches: tuple[KvBatch, ...]


class ReplayUnavailable(Struct, frozen=True):
    """The worker has no replay endpoint or did not answer in time."""

    worker: WorkerId
    rank: int
    detail: str = ""


class SnapshotArrived(Struct, frozen=True, eq=False):
    """The answer to `RequestSnapshot`: all that the worker holds after its batch `last_seq`, as batches for an empty
    index, parents before children (-1: it has not published yet).

    `whole` is False when the agent itself had missed a part: what it names is held, but there may be more.
    """

    worker: WorkerId
    rank: int
    last_seq: int
    batches: tuple[KvBatch, ...]
    whole: bool = True


class SnapshotUnavailable(Struct, frozen=True):
    """The worker has no agent, or the agent did not answer in time or had nothing that it may answer with."""

    worker: WorkerId
    rank: int
    detail: str = ""


class AgentHeartbeat(Struct, frozen=True):
    """What the agent beside a worker knows of it: the newest sequence number and a census of the live blocks."""

    worker: WorkerId
    rank: int
    last_seq: int
    census: Census
    whole: bool


class ResidencyReset(Struct, frozen=True):
    """Somebody cleared the worker's cache through us, or asked us to forget: its residency is dropped now."""

    name: str
    replay: bool = False  # ask the worker for its whole history afterwards


class EventsHeard(Struct, frozen=True):
    """Whether a worker's events reach us, as far as its own counters tell; `problem` says why they seem not to."""

    worker: WorkerId
    problem: str | None = None


# --- requests ----------------------------------------------------------------------------------------------------


class RequestArrived(Struct, frozen=True, eq=False):
    """A client request that wants a worker. `request_id` is unique among live requests."""

    request_id: str
    prompt: Prompt
    model: str | None = None
    adapter: str | None = None
    session_id: str | None = None
    tenant: Tenant = Tenant()
    path: str = "/v1/completions"
    priority: int = 0
    deadline_ms: float | None = None  # from now to the first token: later it is of no use to the client
    epoch: str = "0"  # that its salt carries, as `Router.epochs` said when it came
    draw: int = 0  # the host's chance for this request (uniform 64 bit); the router itself never draws


class AttemptAccepted(Struct, frozen=True):
    """The worker took the request: connected and written in full. Session bindings are made here, not earlier."""

    request_id: str
    attempt: int
    decision_us: float | None = None  # how long the host saw the decision take (hashing apart); for the receipt only


class FirstTokenSeen(Struct, frozen=True):
    """The first generated token passed: prefill is over."""

    request_id: str


class CanGoOn(Struct, frozen=True):
    """Another worker could continue the answer where it broke: after so many generated tokens, as far as is known."""

    generated_tokens: int


class CannotGoOn(Struct, frozen=True):
    """The answer is of a kind, or broke in a place, that nobody else could continue unseen."""

    because: str


class AttemptFailed(Struct, frozen=True):
    """One attempt ended badly. Which side is at fault is said by `fault`.

    `relayed`: bytes of its answer went to the client already, so from here on nothing may be retried; `rest` says
    whether the remainder could come from another worker (None: the host did not follow the stream).
    `whole`: the client has all of it, to its end: an error that was too long to be kept back.
    `body_spent`: its body was passed on as it came, so nobody has it any more to send it again.
    """

    request_id: str
    attempt: int
    fault: Fault
    http_status: int | None = None
    retry_after_s: float | None = None
    detail: str = ""
    relayed: bool = False
    rest: CanGoOn | CannotGoOn | None = None
    whole: bool = False
    body_spent: bool = False


class RequestFinished(Struct, frozen=True):
    """The worker's response was relayed to its end (4xx answers included: they are the worker's own words)."""

    request_id: str
    http_status: int
    usage: Usage = Usage()
    itl_ms: tuple[float, ...] = ()  # gaps between output chunks, as many as the host kept
    given_up: bool = False  # its end says that the engine failed or aborted, whatever its status said before


class ClientLeft(Struct, frozen=True):
    """The client closed its side before the end, or sent the rest of its request so that we had to refuse it."""

    request_id: str
    itl_ms: tuple[float, ...] = ()
    refused_http_status: int | None = None  # what we told it; null when it left by itself
    refused_because: str | None = None


class RequestCut(Struct, frozen=True):
    """The gateway itself ends the request, because it is being shut down; nobody else is at fault.

    `relayed` as in AttemptFailed; `http_status` is what the client has seen by then.
    """

    request_id: str
    reason: str
    relayed: bool = False
    http_status: int | None = None
    itl_ms: tuple[float, ...] = ()


class SessionClosed(Struct, frozen=True):
    """The session ended; its binding goes and does not come back under the same id by itself."""

    session_id: str
    tenant: str | None = None  # None: of every tenant


# --- the operator and the clock ----------------------------------------------------------------------------------


class SessionPlaced(Struct, frozen=True):
    """Another process of this gateway bound a session, or let it go."""

    placement: Placement


class SiblingReported(Struct, frozen=True):
    """All that another process of this gateway has booked; empty when that process is gone."""

    sibling: int
    loads: tuple[SiblingLoad, ...]


class SettingsChanged(Struct, frozen=True):
    """What the operator decides was decided anew, as a whole. The key seed is that of before.

    What did not change is left as it is, so that a policy that was switched while running stays.
    """

    settings: RouterSettings


class DrainStarted(Struct, frozen=True):
    """The gateway is being shut down: who comes from now on is refused, who is here may end."""

    retry_after_s: float


class PolicyChanged(Struct, frozen=True):
    """Switch the policy for all requests that arrive from now on."""

    policy: str
    scorer: str | None = None


class EpochRotated(Struct, frozen=True):
    """Something incompatible changed: requests from now on meet no KV from before (`core/routing/epochs.py`).

    `tenant` belongs to a change of a tenant's policy, `adapter` to one of an adapter. `keep` names workers that have
    the new revision or tokenizer already.
    """

    trigger: Trigger
    tenant: str | None = None
    adapter: str | None = None
    keep: tuple[str, ...] = ()


class WokeUp(Struct, frozen=True):
    """A `WakeAt` that the router asked for is due."""


RarerEvent = (
    KvBatch
    | LoadReported
    | ProbeAnswered
    | AttemptFailed
    | ClientLeft
    | WokeUp
    | ReplayArrived
    | ReplayUnavailable
    | SnapshotArrived
    | SnapshotUnavailable
    | AgentHeartbeat
    | ResidencyReset
    | EventsHeard
    | WorkerJoined
    | WorkerLeft
    | WorkerDrained
    | WorkerResumed
    | SessionClosed
    | PolicyChanged
    | RequestCut
    | SessionPlaced
    | SiblingReported
    | SettingsChanged
    | EpochRotated
    | DrainStarted
)
"""All but those that come with every request."""

Event = RequestArrived | AttemptAccepted | FirstTokenSeen | RequestFinished | RarerEvent
