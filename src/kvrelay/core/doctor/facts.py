"""What was seen of a fleet, as plain values: the rules judge these and look at nothing else.

None always means "not known": not asked, not answered, or not said. It is never a default.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from kvrelay.core.doctor.window import Window


class SourceFacts(Struct, frozen=True, kw_only=True):
    """Where one rank of a worker is expected to publish, and what came from there."""

    rank: int
    endpoint: str
    replay: str | None
    topic: str  # that the router subscribes to; a prefix
    bind: bool  # the worker connects to us
    said_endpoint: str | None = None  # by the worker itself, as seen from here
    said_replay: str | None = None
    said_topic: str | None = None
    raw_endpoint: str | None = None  # as the worker's own configuration has it
    connected: bool | None = None  # None: could not be tried
    why_not_tried: str | None = None
    replay_answered: bool | None = None
    replay_problem: str | None = None
    topics_seen: tuple[str, ...] = ()  # on the wire, whatever was subscribed to
    heard_batches: int | None = None  # with the topic of the router, after the probe; None: no probe
    replayed_batches: int | None = None  # of the probe, by replay only
    malformed: str | None = None
    block_sizes: tuple[int, ...] = ()  # in tokens, of the events that came
    clock_ahead_s: float | None = None  # the publisher's clock against ours


class ProbeFacts(Struct, frozen=True, kw_only=True):
    """Two equal requests with made-up token ids, one output token each."""

    prompt_tokens: int
    problem: str | None = None  # why there is no answer
    first_s: float | None = None
    second_s: float | None = None
    usage_seen: bool = False
    counted_prompt_tokens: int | None = None
    cached_first: int | None = None
    cached_second: int | None = None
    block_hashes: tuple[int, ...] = ()  # the engine's own names of the prompt's blocks


class WorkerFacts(Struct, frozen=True, kw_only=True):
    """One worker as the configuration means it and as it answered."""

    name: str
    url: str
    problem: str | None = None  # why it could not be asked
    engine: str | None = None
    version: str | None = None
    models: tuple[str, ...] = ()
    has_event_stream: bool | None = None  # whether this kind of engine can publish events at all
    events_switched_off: bool = False  # `events = "none"` in the configuration
    wanted_block_size: int | None = None  # in the configuration
    said_block_size: int | None = None  # by the worker, in tokens
    sources: tuple[SourceFacts, ...] = ()
    sources_refused: str | None = None  # why the router does not use those that the worker names
    probe: ProbeFacts | None = None
    has_metrics: bool | None = None
    missing_metrics: tuple[str, ...] = ()
    cache_settings: Mapping[str, str] | None = None  # labels of the engine's own information metric
    tokens: Mapping[str, tuple[int, ...] | None] = {}  # per made-up text: ids by the worker
    clock_ahead_s: float | None = None  # from its Date header
    reports_kv: bool = False  # the configuration names where its KV connector answers
    load_failure_policy: str | None = None  # of the engine, by its connector's word
    kv_versions: Mapping[str, str] | None = None  # packages in the worker's process that move KV, and their engine
    is_local: bool = False
    http_open_to_all: bool | None = None  # listens beyond loopback; None: not on this machine
    open_event_ports: tuple[int, ...] = ()  # of its publisher and replay, beyond loopback


class RouterWorkerFacts(Struct, frozen=True, kw_only=True):
    """What a running gateway believes of one worker."""

    name: str
    routable: bool
    index_state: str  # the worst of its ranks
    index_problem: str | None
    compared: int
    over_claims: int
    under_claims: int
    resyncs: int
    orphan_blocks: int
    malformed_events: int


class RouterFacts(Struct, frozen=True, kw_only=True):
    """A running gateway, by its admin port."""

    url: str
    problem: str | None = None
    policy: str | None = None
    index_problem: str | None = None
    workers: tuple[RouterWorkerFacts, ...] = ()


class TokenizerFacts(Struct, frozen=True, kw_only=True):
    """The router's own tokenizer, if it has one."""

    path: str | None = None
    problem: str | None = None  # why it could not be loaded
    tokens: Mapping[str, tuple[int, ...] | None] = {}


class StoreFacts(Struct, frozen=True, kw_only=True):
    """A tier of `[store]`, tried with one small object."""

    name: str
    problem: str | None = None  # why it could not be opened, written to or read from
    write_ms: float | None = None
    read_ms: float | None = None
    host_memory_bytes: int = 0  # that it may take of this machine


class HostFacts(Struct, frozen=True, kw_only=True):
    """The machine that the doctor runs on."""

    memory_bytes: int | None = None  # the smaller of the machine's and the control group's
    free_bytes: int | None = None  # what processes could still take
    has_accelerator: bool = False  # device memory that caches lie in is none of the machine's then
    stores: tuple[StoreFacts, ...] = ()
    store_deadline_ms: float = 50.0
    declared_failure_policy: str = "recompute"  # `store.failure_policy`


class Facts(Struct, frozen=True, kw_only=True):
    """One examination."""

    policy: str
    workers: tuple[WorkerFacts, ...]
    tokenizer: TokenizerFacts = TokenizerFacts()
    router: RouterFacts | None = None  # None: no gateway was named
    host: HostFacts = HostFacts()
    probed: bool = True
    window: Window | None = None  # traffic of a running gateway; None: no gateway was watched
