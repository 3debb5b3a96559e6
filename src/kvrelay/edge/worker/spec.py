"""What a mock worker is told at its start, and what it says when it is ready."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from kvrelay.core.contract.keys import MAX_BLOCK_TOKENS
from kvrelay.core.engine.cost import StepCost
from kvrelay.core.engine.engine import EngineSettings
from kvrelay.core.engine.scheduler import SchedulerLimits
from kvrelay.edge.system.urls import is_loopback

DEFAULT_MAX_MODEL_LEN = 32_768
SMALLEST_VOCABULARY = 260  # bytes and special tokens, see `tokenizer.py`
EVENTS_MODES = ("bind", "connect")


class MockSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker process. Port 0 and `auto` endpoints take free loopback ports."""

    name: str = "mock-0"
    host: str = "127.0.0.1"
    port: int = 0
    model: str = "mock-model"
    revision: str = ""  # of its weights: workers of different revisions go by one name and never agree on KV
    adapters: tuple[str, ...] = ()
    vocab_size: int = 200_000
    block_size_tokens: int = 16
    blocks: int = 4096
    max_model_len: int | None = None  # None: the pool's capacity, at most DEFAULT_MAX_MODEL_LEN
    prefill_tokens_per_s: float = 8000.0
    decode_ms: float = 8.0
    step_overhead_ms: float = 0.2
    max_num_seqs: int = 128
    token_budget: int = 2048
    reply_tokens: int = 128  # where a chat without `max_tokens` ends by itself
    events: str = "auto"  # auto | none | a ZMQ endpoint
    events_mode: str = "bind"  # bind | connect
    replay: str = "auto"  # auto | none | a ZMQ endpoint
    replay_buffer_batches: int = 10_000
    hash_seed: str = "0"
    seed: int = 0  # chance of faults with a probability
    drain_s: float = 30.0
    store: dict[str, Any] | None = None  # tiers to share KV through, see `edge/stores/config.py`
    store_chunk_blocks: int = 16  # blocks that are stored and loaded together
    contract: dict[str, Any] = {}  # members of the compatibility contract that differ from this worker's own
    api_key: str | None = None  # wanted on paths below /v1, as the engine does with `--api-key`
    insecure: bool = False  # allow listeners beyond loopback
    faults: tuple[dict[str, Any], ...] = ()  # switched on from the start, see `faults.py`

    @property
    def capacity_tokens(self) -> int:
        return self.blocks * self.block_size_tokens

    @property
    def context_tokens(self) -> int:
        """`max_model_len` with its default filled in."""
        if self.max_model_len is not None:
            return self.max_model_len
        return min(DEFAULT_MAX_MODEL_LEN, self.capacity_tokens)

    @property
    def topic(self) -> str:
        return f"kv@{self.name}@{self.model}"

    def numbered(self, index: int) -> MockSpec:
        """This spec for one of several workers: names, ports and bound endpoints count up."""
        binds = self.events_mode == "bind"
        return msgspec.structs.replace(
            self,
            name=f"{self.name}-{index}",
            port=self.port + index if self.port else 0,
            events=_count_up(self.events, index) if binds else self.events,
            replay=_count_up(self.replay, index),
        )

    def engine_settings(self) -> EngineSettings:
        return EngineSettings(
            model=f"{self.model}@{self.revision}" if self.revision else self.model,
            block_size_tokens=self.block_size_tokens,
            blocks=self.blocks,
            max_model_len=self.context_tokens,
            limits=SchedulerLimits(token_budget=self.token_budget, max_num_seqs=self.max_num_seqs),
            cost=StepCost(
                prefill_tokens_per_s=self.prefill_tokens_per_s,
                decode_ms=self.decode_ms,
                overhead_ms=self.step_overhead_ms,
            ),
            hash_seed=self.hash_seed,
        )


class MockReady(Struct, frozen=True, kw_only=True):
    """The line that a worker prints once it serves. `events` and `replay` are endpoints to connect to, or null."""

    name: str
    url: str
    events: str | None
    replay: str | None
    pid: int
    incarnation: str
    topic: str | None
    model: str
    block_size_tokens: int
    mock: bool = True


class SpecProblem(Struct, frozen=True):
    """One member of a spec that is not legal, with what would be."""

    member: str
    received: object
    legal: str


def spec_problems(spec: MockSpec) -> tuple[SpecProblem, ...]:
    """Everything that is wrong with a spec, not only the first."""
    return (*_bad_numbers(spec), *_bad_addresses(spec))


def _bad_numbers(spec: MockSpec) -> Iterator[SpecProblem]:
    ranges: dict[str, tuple[float, float]] = {
        "port": (0, 65_535),
        "vocab_size": (SMALLEST_VOCABULARY, 2**32),
        "block_size_tokens": (1, MAX_BLOCK_TOKENS),
        "blocks": (1, 2**24),
        "prefill_tokens_per_s": (0.001, 10**12),
        "decode_ms": (0, 1_000_000),
        "step_overhead_ms": (0, 1_000_000),
        "max_num_seqs": (1, 2**16),
        "token_budget": (1, 2**24),
        "reply_tokens": (1, 2**24),
        "replay_buffer_batches": (1, 2**24),
        "drain_s": (0, 86_400),
        "store_chunk_blocks": (1, 2**16),
    }
    for member, (smallest, largest) in ranges.items():
        received = getattr(spec, member)
        if not smallest <= received <= largest:
            yield SpecProblem(member, received, f"{smallest} to {largest}")
    if spec.capacity_tokens > 0 and not 2 <= spec.context_tokens <= spec.capacity_tokens:
        legal = f"2 to {spec.capacity_tokens}, the tokens that {spec.blocks} blocks of {spec.block_size_tokens} hold"
        yield SpecProblem("max_model_len", spec.context_tokens, legal)


def _bad_addresses(spec: MockSpec) -> Iterator[SpecProblem]:
    if spec.events_mode not in EVENTS_MODES:
        yield SpecProblem("events_mode", spec.events_mode, " or ".join(f"`{mode}`" for mode in EVENTS_MODES))
    if not spec.insecure and not is_loopback(spec.host):
        yield SpecProblem("host", spec.host, "a loopback address; anything else needs `--insecure`")
    for member, endpoint, binds in (
        ("events", spec.events, spec.events_mode != "connect"),
        ("replay", spec.replay, True),
    ):
        problem = _endpoint_problem(endpoint, binds=binds, insecure=spec.insecure)
        if problem is not None:
            yield SpecProblem(member, endpoint, problem)


def _endpoint_problem(endpoint: str, *, binds: bool, insecure: bool) -> str | None:
    """What is wrong with a ZMQ endpoint, in the form "legal: ..."."""
    if endpoint == "none" or (endpoint == "auto" and binds):
        return None
    if endpoint.startswith("ipc://"):
        return None
    address = urlsplit(endpoint)
    if address.scheme != "tcp" or not address.netloc.rpartition(":")[0]:
        return "`none`, `auto` (not with `connect`), `tcp://HOST:PORT` or `ipc://PATH`"
    host = address.netloc.rpartition(":")[0].strip("[]")
    if binds and not insecure and not is_loopback(host):
        return "an endpoint on a loopback address such as `tcp://127.0.0.1:5557`; anything else needs `--insecure`"
    if not binds and host == "*":
        return "an address to connect to; `*` can only be bound"
    return None


def _count_up(endpoint: str, index: int) -> str:
    """The endpoint of worker `index`: port + index; a path gets a suffix, as two workers cannot share it."""
    if endpoint in ("auto", "none") or index == 0:
        return endpoint
    if endpoint.startswith("ipc://"):
        return f"{endpoint}-{index}"
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + index}" if port.isdigit() and port != "0" else endpoint
