"""Every configuration key: its default, its unit (last word of the name), its legal range and what turning it does.

A key that is published but that nothing reads yet carries `unsupported`: it is validated, and setting it to anything
but its default stops the start. Accepting it silently would be a promise that is not kept.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from kvrelay.core.contract.keys import MAX_BLOCK_TOKENS
from kvrelay.core.model.place import HopCosts
from kvrelay.core.routing.settings import RouterSettings, Spill, Weights
from kvrelay.edge.system.urls import BadUrl, canonical_worker_url, name_from_url

PolicyName = Literal["cache_load", "least_load", "random", "round_robin", "sticky", "sticky_load"]
ScorerName = Literal["predict", "weights"]
AdapterName = Literal["auto", "vllm", "sglang", "llamacpp", "openai", "mock"]
RoleName = Literal["both", "prefill", "decode"]

_ROUTER = RouterSettings()
_DRIFT = _ROUTER.drift
_WEIGHTS = Weights()
_SPILL = Spill()
_HOPS = HopCosts()
_NAME = re.compile(r"^[A-Za-z0-9_.:\[\]-]{1,80}$")


class Section(BaseModel):
    """A table of the file: frozen, and closed to keys that it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


def key(default: Any, meaning: str, effect: str, **limits: Any) -> Any:
    """A key with what it means and what raising, lowering or setting it does."""
    return Field(default, description=meaning, json_schema_extra={"effect": effect}, **limits)


class Supported:
    """Accepts the values that have an effect in this version, and refuses the published others."""

    def __init__(self, *values: object) -> None:
        self.values = values

    def __call__(self, value: Any) -> Any:
        if value not in self.values:
            raise PydanticCustomError("unsupported", "supported: {supported}", {"supported": list(self.values)})
        return value


def _only(*values: object) -> AfterValidator:
    return AfterValidator(Supported(*values))


def _worker_url(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return canonical_worker_url(value)
    except BadUrl as error:
        raise PydanticCustomError("worker_url", "{reason}", {"reason": str(error)}) from error


def _store_url(value: str) -> str:
    """A password would show up wherever the configuration is printed."""
    parts = urlsplit(value)
    if parts.password is not None or not parts.scheme:
        raise PydanticCustomError(
            "worker_url", "{reason}", {"reason": "a URL with a scheme and without a password (use ?password_file=PATH)"}
        )
    return value


def _name(value: str) -> str:
    if not _NAME.match(value):
        raise PydanticCustomError("name", "letters, digits and . _ : [ ] -, at most 80 of them", {})
    return value


def _event_endpoint(value: str) -> str:
    if value not in ("auto", "none") and not value.removeprefix("bind:").startswith(("tcp://", "ipc://")):
        raise PydanticCustomError(
            "event_endpoint", "`auto`, `none`, tcp://HOST:PORT, ipc://PATH, or bind: before one of the two", {}
        )
    return value


def _agent_endpoint(value: str) -> str:
    if value and not value.startswith(("tcp://", "ipc://")):
        raise PydanticCustomError("agent_endpoint", "tcp://HOST:PORT or ipc://PATH, as `kvrelay agent` prints it", {})
    return value


class Timeouts(Section):
    connect_s: float = key(
        2.0,
        "Longest wait for a TCP connection to a worker.",
        "Lower: a dead worker is given up sooner. Higher: slow networks are tolerated.",
        gt=0,
        le=300,
    )
    first_byte_s: float = key(
        300.0,
        "Longest wait from the request being written to the first byte of the worker's answer.",
        "It must be longer than the longest prefill plus queueing. Lower: a stuck worker is noticed sooner.",
        gt=0,
        le=86_400,
    )
    idle_s: float = key(
        60.0,
        "Longest silence in the middle of an answer.",
        "Lower: a hanging stream is broken off sooner. Higher: slow decodes are tolerated.",
        gt=0,
        le=86_400,
    )
    total_s: float = key(
        1800.0,
        "Longest time for one client request, all its attempts together.",
        "Higher: long generations may end. Lower: resources come back sooner.",
        gt=0,
        le=604_800,
    )


class Limits(Section):
    body_bytes: int = key(
        64 * 2**20,
        "Largest request body that is read before it is routed; a larger one is passed on unread, while it comes.",
        "Higher: longer contexts and images are scored and can be retried, more memory per connection.",
        ge=1024,
        le=2**31,
    )
    hold_bytes: int = key(
        2**20,
        "The same for bodies that routing cannot read anyway: forms, audio, all but JSON.",
        "Higher: larger files can be retried elsewhere, more memory per connection.",
        ge=0,
        le=2**31,
    )
    streamed_body_bytes: int = key(
        2**30,
        "Largest request body that is passed on while it comes; a larger one is answered 413.",
        "Higher: larger files pass. Not above body_bytes: whatever is larger than that is answered 413.",
        ge=0,
        le=2**40,
    )
    header_bytes: int = key(
        64 * 2**10,
        "Largest request head; a larger one is answered 431.",
        "Higher: longer cookies and tokens pass.",
        ge=1024,
        le=2**20,
    )
    prefill_weight: float = key(
        _ROUTER.capacity.prefill_weight,
        "Requests that a thousand prefill tokens count as, towards a worker's max_active_requests; 0: nothing extra.",
        "Higher: fewer long prompts at a time on one worker, so that short ones behind them wait less.",
        ge=0,
        le=1000,
    )
    decode_weight: float = key(
        _ROUTER.capacity.decode_weight,
        "The same for a thousand KV blocks of requests that generate.",
        "Higher: fewer long contexts at a time on one worker, so that its KV cache is not overcommitted.",
        ge=0,
        le=1000,
    )
    queue_depth: int = key(
        0,
        "Requests that may wait in the gateway for a worker below its max_active_requests; 0: none wait.",
        "Higher: bursts are absorbed. Lower: clients hear sooner that they should try elsewhere.",
        ge=0,
        le=1_000_000,
    )
    queue_wait_s: float = key(
        30.0,
        "Longest wait in that queue; who would wait longer is refused at once with a retry hint.",
        "Higher: more patience under load. Lower: fresher answers, earlier refusals.",
        gt=0,
        le=3600,
    )


class Drain(Section):
    grace_s: float = key(
        30.0,
        "After SIGTERM: how long running requests may still take.",
        "Higher: fewer streams are cut. Lower: restarts are quicker.",
        ge=0,
        le=3600,
    )


class GatewaySection(Section):
    host: str = key("127.0.0.1", "Address of the data port.", "Anything but loopback needs TLS or `insecure`.")
    port: int = key(8000, "The data port; 0 takes a free one.", "Clients talk to this port.", ge=0, le=65535)
    admin_host: str = key("127.0.0.1", "Address of the admin port.", "Anything but loopback needs a token.")
    admin_port: int = key(8001, "The admin port; 0 takes a free one.", "/metrics and /admin live here.", ge=0, le=65535)
    policy: PolicyName = key("cache_load", "How a worker is chosen.", "Can be switched live on the admin port.")
    scorer: ScorerName = key(
        "predict",
        "Scorer of `cache_load`: predicted time to first token, or stated weights.",
        "`weights` makes the factors of [policy.cache_load] effective.",
    )
    processes: int = key(
        1,
        "Gateway processes that share the data port; more than 1 need Linux (SO_REUSEPORT).",
        "Higher: more cores serve. Each process has its own index and its own bounds, such as queue_depth.",
        ge=1,
        le=64,
    )
    zone: str | None = key(
        None,
        "Name of the zone that this gateway is in.",
        "Set, as the zone of workers is: of equally good workers the nearer one is taken, see [policy.hops].",
    )
    rack: str | None = key(None, "Name of its rack within the zone.", "Set: workers in the same rack count as nearer.")
    insecure: bool = key(
        False,
        "Allow listeners beyond loopback without TLS and credentials.",
        "true: whoever reaches the port can use it; said at start.",
    )
    admin_token_file: Path | None = key(
        None, "File with the bearer token of the admin port.", "Set: every admin call needs the token."
    )
    tls_cert: Path | None = key(None, "Certificate chain (PEM) of the data port.", "Set with tls_key: HTTPS.")
    tls_key: Path | None = key(None, "Private key (PEM) of the data port.", "Set with tls_cert: HTTPS.")
    epochs_file: Path | None = key(
        None,
        "Where epochs of keys are kept, so that a restart does not go back to the first one.",
        "Set: rotations outlive the gateway. Unset: they last until it ends.",
    )
    timeouts: Timeouts = Timeouts()
    limits: Limits = Limits()
    drain: Drain = Drain()

    @model_validator(mode="after")
    def _certificate_has_its_key(self) -> GatewaySection:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise PydanticCustomError("tls_pair", "set both `tls_cert` and `tls_key`, or neither", {})
        return self


class WorkerConfig(Section):
    """One `[[workers]]` entry; also what POST /admin/workers builds."""

    url: Annotated[str, BeforeValidator(_worker_url)] = key(
        ..., "Base URL of the worker.", "Made canonical; /v1 at its end is not added twice."
    )
    name: Annotated[str, AfterValidator(_name)] = key(
        "", "Name in receipts, metrics and the admin API.", "Default: host and port of the URL.", validate_default=False
    )
    model: str | None = key(None, "Model it serves.", "Default: what the worker itself says.")
    max_active_requests: int = key(
        0,
        "Requests it gets at the same time from this gateway; 0: no limit.",
        "Lower: its queue stays short and the gateway's queue, which knows all workers, does the waiting.",
        ge=0,
        le=1_000_000,
    )
    role: Annotated[RoleName, _only("both")] = key("both", "Part of the work it takes.", "Only `both` so far.")
    zone: str | None = key(None, "Name of the zone that it is in.", "Unset: how far it is away is not known.")
    rack: str | None = key(None, "Name of its rack within the zone.", "Compared with the gateway's own.")
    api_key_file: Path | None = key(
        None,
        "File with the key that the worker wants.",
        "Shown to this worker only: in our own calls, and for clients that have a tenant's key; others bring theirs.",
    )
    ca_file: Path | None = key(
        None,
        "Certificate authorities (PEM) that may have signed the certificate of an https:// worker.",
        "Unset: those that the system trusts.",
    )
    tls_verify: bool = key(
        True,
        "Check the certificate of an https:// worker, and that it is for its host.",
        "false: whoever answers at this address gets the prompts and the worker's key.",
    )
    events: Annotated[str, AfterValidator(_event_endpoint)] = key(
        "auto",
        "Where its KV events are published.",
        "`auto` asks the worker; `none` makes its residency approximate; bind: lets workers connect to us.",
    )
    replay: Annotated[str, AfterValidator(_event_endpoint)] = key(
        "auto", "Its replay endpoint.", "`auto` asks the worker; `none`: a gap drops what is known of it."
    )
    topic: str = key(
        "",
        "Topic of its events, or the beginning of it.",
        "Empty: what the worker says, else every topic. Workers that share one socket need one each.",
    )
    agent: Annotated[str, AfterValidator(_agent_endpoint)] = key(
        "",
        "Where `kvrelay agent` beside the worker publishes its heartbeat.",
        "Set: a late start, a lost tail and a gap beyond the replay are mended by the agent's snapshot.",
    )
    kv_report: Annotated[str | None, BeforeValidator(_worker_url)] = key(
        None,
        "Where the kvrelay KV connector in this worker answers (its setting `report`), as http://HOST:PORT.",
        "Unset: receipts of streamed requests do not know what was loaded from the store; others do.",
    )
    block_size: int | None = key(
        None,
        "Tokens per block of its prefix cache, for workers that do not say it.",
        "A wrong one costs every match until its events show the right one; `kvrelay doctor` compares.",
        ge=1,
        le=MAX_BLOCK_TOKENS,
    )
    gpus: int | None = key(
        None,
        "GPUs it runs on, for what a task costs.",
        "Unset: GPU-seconds are not known and not shown.",
        ge=0,
        le=100_000,
    )
    adapter: AdapterName = key(
        "auto", "Kind of engine.", "`auto` asks the worker; `openai` expects nothing beyond the OpenAI paths."
    )

    @model_validator(mode="before")
    @classmethod
    def _name_from_url(cls, data: Any) -> Any:
        if isinstance(data, dict) and not data.get("name") and isinstance(data.get("url"), str):
            try:
                return {**data, "name": name_from_url(canonical_worker_url(data["url"]))}
            except BadUrl:
                return data  # the url's own validator says what is wrong
        return data


class HealthSection(Section):
    interval_s: float = key(
        1.0,
        "Time between two probes (and two load scrapes) of one worker.",
        "Lower: failures and returns are seen sooner, more requests to the workers.",
        ge=0.05,
        le=3600,
    )
    timeout_s: float = key(
        5.0,
        "Longest wait for a probe's answer.",
        "Lower: a hanging worker is out sooner. Higher: a busy worker's slow answers are tolerated.",
        gt=0,
        le=300,
    )
    failures: int = key(
        _ROUTER.health_failures, "Failures in a row that take a worker out.", "Higher: calmer, slower.", ge=1, le=1000
    )
    successes: int = key(
        _ROUTER.health_successes, "Successes in a row that put it back.", "Higher: calmer, slower.", ge=1, le=1000
    )


class AffinitySection(Section):
    header: str = key("x-session-id", "Request header that names the session.", "x-dynamo-session-id is read as well.")
    ttl_s: float = key(
        300.0,
        "How long a session stays bound after the end of its last request; 0: the header is identity only.",
        "Higher: later turns still find their worker. Lower: load evens out sooner.",
        ge=0,
        le=604_800,
    )
    hard: bool = key(
        False,
        "Refuse a turn rather than send it to another worker than its session's.",
        "true: refused while that worker is down, draining or full; none is spilled. A worker gone for good frees it.",
    )


class RetrySection(Section):
    attempts: int = key(
        _ROUTER.retry_attempts, "Attempts per request, the first included.", "1: nothing is retried.", ge=1, le=10
    )
    budget_ratio: float = key(
        _ROUTER.retry_budget_ratio,
        "Retries per first attempt over the whole fleet, beyond a small fixed allowance; 0: none.",
        "Higher: more requests survive a failure, more extra load during it.",
        ge=0,
        le=10,
    )
    migrate: bool = key(
        _ROUTER.migrate,
        "Continue a stream whose worker was lost on another worker.",
        "true: fewer broken streams; every stream is read piece by piece, which costs time per token.",
    )


class TokensSection(Section):
    tokenizer: Path | None = key(
        None, "tokenizer.json of the served model.", "Set: prompts are tokenized here. Unset: the worker is asked."
    )
    template: Path | None = key(None, "Chat template (jinja) of the served model.", "Needed to tokenize chats here.")
    cache_mb: int = key(64, "Memory for token ids of texts seen before.", "Higher: fewer repeats.", ge=0, le=65_536)


class CacheLoadSection(Section):
    """Factors of `alpha x reusable - beta x active prefill - gamma x active decode - delta x transfer`."""

    alpha: float = key(_WEIGHTS.alpha, "Credit per reusable block.", "Higher: caches attract more.", ge=0, le=1e6)
    beta: float = key(
        _WEIGHTS.beta, "Debit per active prefill token.", "Higher: queued prefills repel more.", ge=0, le=1e6
    )
    gamma: float = key(
        _WEIGHTS.gamma, "Debit per active decode block.", "Higher: busy decoders repel more.", ge=0, le=1e6
    )
    delta: float = key(
        _WEIGHTS.delta, "Debit per ms of estimated transfer.", "Higher: far copies are worth less.", ge=0, le=1e6
    )


class StickyLoadSection(Section):
    """A turn spills if its session's worker has more than `spill_ratio x fewest + spill_requests` requests in hand."""

    spill_ratio: float = key(
        _SPILL.ratio,
        "How many times the requests of the least busy worker a session's worker may have.",
        "Higher: sessions return to a busy worker. Lower: more turns are computed anew elsewhere.",
        ge=1,
        le=1000,
    )
    spill_requests: int = key(
        _SPILL.requests,
        "How many requests it may have beyond that.",
        "Higher: short queues are waited for. Lower: turns spill at low load as well.",
        ge=0,
        le=1_000_000,
    )


class IndexSection(Section):
    drift_requests: int = key(
        _DRIFT.window_requests,
        "Finished requests per worker rank over which claims are held against actual hits.",
        "Higher: slower and surer to ask for a resync.",
        ge=4,
        le=10_000,
    )
    drift_ratio: float = key(
        _DRIFT.min_ratio,
        "Part of their tokens that may differ, beyond what events explain, before a resync is asked for.",
        "Lower: small losses of events are repaired too. Higher: only large ones.",
        gt=0,
        le=1,
    )
    resync_backoff_s: float = key(
        _DRIFT.backoff_s,
        "Least time between two resyncs of one worker rank; doubles while they do not help, up to an hour.",
        "Lower: quicker repair. Higher: fewer replays.",
        gt=0,
        le=3_600,
    )
    guess_ttl_s: float = key(
        _ROUTER.approximate_ttl_s,
        "How long a worker without events is believed to keep blocks that nothing used.",
        "Higher: later turns are still sent to it. Lower: fewer claims of what it has evicted.",
        gt=0,
        le=604_800,
    )


class HopsSection(Section):
    """What the way to a worker and back adds to a first token; on our own host, or where nobody says: nothing."""

    rack_ms: float = key(_HOPS.rack_ms, "In the same rack.", "Higher: the own host is preferred more.", ge=0, le=60_000)
    zone_ms: float = key(_HOPS.zone_ms, "In the same zone.", "Higher: the own rack is preferred more.", ge=0, le=60_000)
    beyond_ms: float = key(
        _HOPS.beyond_ms,
        "In another zone.",
        "Higher: only a deeper match or a shorter queue takes requests there.",
        ge=0,
        le=60_000,
    )


class PolicySection(Section):
    hops: HopsSection = HopsSection()
    cache_load: CacheLoadSection = CacheLoadSection()
    sticky_load: StickyLoadSection = StickyLoadSection()


class ReceiptsSection(Section):
    path: Path | None = key(
        None, "File for route receipts, one JSON line each.", "Unset: only the last ones, in memory, on the admin port."
    )
    rotate_mb: int = key(64, "Size at which the file is rotated.", "Higher: fewer, larger files.", ge=1, le=65_536)
    keep: int = key(8, "Rotated files kept; older ones are deleted.", "Higher: longer history.", ge=0, le=10_000)


class ObserveSection(Section):
    task_idle_s: float = key(
        300.0,
        "A session is over, and counted as a task, when nothing of it has ended for this long.",
        "Higher: slow sessions stay one task. Lower: tasks are counted sooner.",
        gt=0,
        le=86_400,
    )
    gpu_hour_price: float | None = key(
        None,
        "Price of one GPU for one hour, in whatever currency.",
        "Set, with workers.gpus: the cost per successful task is shown.",
        ge=0,
        le=1e6,
    )
    results: Path | None = key(
        None,
        "Folder with results of drills and gates, for the live page.",
        "Unset: the page says that there are none.",
    )


class TracingSection(Section):
    endpoint: str | None = key(
        None,
        "OTLP/HTTP address for traces, such as http://127.0.0.1:4318/v1/traces.",
        "Set: some requests are traced; needs the extra `otel`. Unset: trace headers pass as they come.",
    )
    sample_ratio: float = key(
        0.01, "Share of requests that are traced.", "Higher: more spans, and more work for each.", ge=0, le=1
    )
    follow_parent: bool = key(
        True,
        "Whether a client's own sampling decision (`traceparent`) holds.",
        "false: only sample_ratio decides, so clients cannot have everything traced.",
    )


class TenantSection(Section):
    api_keys_file: Path | None = key(None, "File with the tenant's API keys, one a line.", "A key decides the tenant.")
    salt_file: Path | None = key(None, "File with the tenant's salt.", "Its prefixes match nobody else's.")
    trust_group: Annotated[str | None, _only(None)] = key(None, "Tenants that may share prefixes.", "Not built yet.")
    retention_s: Annotated[float | None, _only(None)] = key(None, "How long stored KV is kept.", "Not built yet.")


class StoreTier(Section):
    """One place for KV; the engine connectors and `kvrelay mock --store` use them in the order given."""

    url: Annotated[str, AfterValidator(_store_url)] = key(
        ..., "Where it is: memory://NAME, file:///DIR, valkey://HOST:PORT, s3://BUCKET, ...", "Required."
    )
    kind: Literal["", "memory", "file", "valkey", "s3", "mooncake", "peer"] = key(
        "", "Kind of store.", "Set: checked against the URL, which says it already."
    )
    name: str = key("", "Its name in metrics and messages.", "Unset: the URL's scheme.")
    bytes: int | None = key(None, "Most bytes kept there.", "Higher: fewer evictions. Unset: no limit here.", ge=1)
    ttl_s: float | None = key(None, "How long they are kept.", "Lower: forgotten sooner. Unset: until evicted.", gt=0)
    eviction: Literal["lru", "ttl", "lfu", "s3fifo"] = key(
        "lru", "Who leaves a full tier.", "s3fifo: scans do not flush it."
    )
    write: Literal["through", "back", "selective", "never"] = key(
        "through", "When it is written.", "back: when the tier above evicts. selective: at second sight."
    )
    promote: Literal["always", "second_sight", "never"] = key(
        "always", "Whether hits of tiers below are copied here.", "second_sight: only what is used again."
    )
    codec: Literal["raw", "zstd", "lz4", "fp8"] = key(
        "raw", "How payloads are packed.", "zstd: pays below about 0.3 GB/s. fp8: half the bytes, loses precision."
    )
    max_fetches: int = key(8, "Fetches at once.", "Higher: quicker loads, larger bursts.", ge=1, le=256)
    max_writes: int = key(4, "Writes at once.", "Higher: saves end sooner.", ge=1, le=256)
    index: bool = key(
        False,
        "Whether look-ups are answered from an index in each process.",
        "true: no round trip; what others write is found when the tier is looked through.",
    )


class StoreSection(Section):
    tiers: tuple[StoreTier, ...] = key((), "Tiers, nearest first.", "None: nothing is shared.")
    failure_policy: Literal["recompute", "fail", "fallback"] = key(
        "recompute", "What a failed load leads to.", "fallback: the tiers below are tried first. fail: an error."
    )
    deadline_ms: float = key(50.0, "Longest wait for a load.", "Higher: slow tiers are waited for.", gt=0, le=60_000)
    break_even: bool = key(True, "Whether a load slower than computing is left out.", "false: every hit is loaded.")
    probe_interval_s: float = key(
        5.0, "Between questions to a silent tier.", "Lower: used again sooner, asked more often.", gt=0, le=3600
    )
    sample_interval_s: float = key(
        5.0, "Between measurements of a tier that does not pay.", "Lower: noticed sooner when it does.", gt=0, le=3600
    )
    keys: str = key(
        "none", "Encryption keys: none, file:PATH, env:NAME, command:WORDS.", "Set: objects are encrypted per tenant."
    )
    cipher: Literal["aes-256-gcm", "aegis-256x2"] = key(
        "aes-256-gcm", "What encrypts new objects; both are read.", "aegis-256x2: up to three times as fast."
    )
    ttl_s: float | None = key(None, "How long any object may be used.", "Lower: old KV is not used.", gt=0)
    piece_bytes: int = key(
        4 * 1024 * 1024, "Most bytes of one object; larger chunks are split.", "Lower: more objects.", ge=4096, le=2**30
    )
    reconcile_s: float = key(
        60.0, "Between looks through tiers with an index.", "Lower: others' objects are found sooner.", gt=0, le=86_400
    )
