"""Everything that a checklist may look at, as plain values: what was run, drilled, configured and measured.

`source` of a record is where it lies (a folder, a file, a URL), so that every answer can point at its evidence. None
always means "not known", never a default.
"""

from __future__ import annotations

from msgspec import Struct

from kvrelay.core.doctor.facts import Facts
from kvrelay.core.doctor.finding import Finding
from kvrelay.core.gates.judge import Verdict
from kvrelay.core.sizing.breakeven import Link, Prefill
from kvrelay.core.sizing.memory import MemoryVerdict
from kvrelay.core.stats.paired import PairedEffect

SPLIT = "split"
ADDED = ("cpu", "remote", SPLIT)
"""What can be added to a router, in the order in which it is to be added."""


class ArmEvidence(Struct, frozen=True, kw_only=True):
    """One contender of a run, its repeats pooled. `added`: what its gateways were really started with, of `ADDED`."""

    name: str
    policy: str
    added: tuple[str, ...] = ()
    requests: int
    failures: int
    tasks_planned: int
    tasks_successful: int
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    ttft_count: int
    eligible_tokens: int
    cached_tokens: int | None
    route_loss_tokens: int
    queue_known: bool  # receipts say how long the chosen worker's queue was
    transferred_bytes: int | None  # from shared tiers
    ttft_ratio: PairedEffect | None = None  # against the run's baseline, request by request
    kv_usage_peak_ratio: float | None = None

    @property
    def hit_ratio(self) -> float | None:
        """Of what could have been hit; None where that is nothing or not known."""
        if self.cached_tokens is None or not self.eligible_tokens:
            return None
        return self.cached_tokens / self.eligible_tokens


class WaveEvidence(Struct, frozen=True):
    """The first answers of one worker after its start. `ratio`: their median to the median of those that follow."""

    worker: str
    requests: int
    p95_ms: float | None
    ratio: float | None


class TierCall(Struct, frozen=True):
    """Whether an arm's tier is worth it against the arm without it, by the built-in rule: keep, drop or unknown."""

    tier: str
    candidate: str
    baseline: str
    decision: str
    reasons: tuple[str, ...]


class RunEvidence(Struct, frozen=True, kw_only=True):
    """A replay or demo, counted anew from its raw records."""

    source: str
    digest: str
    trace_sha256: str
    label: str  # mock | single_worker_baseline | routing_result
    hardware: str
    baseline: str
    repeats: int
    arms: tuple[ArmEvidence, ...]
    problems: tuple[str, ...] = ()  # why its arms cannot be compared: sameness, isolation, gaps in the manifest
    cold_start: bool | None = None  # every arm began with empty caches; None: the engines' counters do not say
    waves: tuple[WaveEvidence, ...] = ()
    verdict: Verdict | None = None  # None: it ran without gates
    ttft_p95_limit_ms: float | None = None  # that its gates state
    tier_calls: tuple[TierCall, ...] = ()

    def arm(self, name: str) -> ArmEvidence | None:
        return next((arm for arm in self.arms if arm.name == name), None)


class BlockEvidence(Struct, frozen=True):
    """One block of a replay in blocks. `before`: nothing, reset or restart."""

    policy: str
    name: str
    before: str
    requests: int
    failures: int
    p50_ms: float | None
    p95_ms: float | None
    hit_share: float | None


class BlocksEvidence(Struct, frozen=True):
    """`trace_sha256` ties it to runs of the same trace."""

    source: str
    trace_sha256: str
    label: str
    blocks: tuple[BlockEvidence, ...]


class DrillEvidence(Struct, frozen=True):
    """`broken`: promises that were not kept, in words. `fleet`: simulated, mock or attached."""

    source: str
    drill: str
    fleet: str
    verdict: str
    broken: tuple[str, ...] = ()


class TierEvidence(Struct, frozen=True, kw_only=True):
    """A tier of the deployment. `medium`: cpu, disk, remote or peer."""

    name: str
    medium: str
    url: str


class ProbeEvidence(Struct, frozen=True, kw_only=True):
    """A shared tier that was written to and read from just now. Without a `link` there is a `problem`.

    `connect_s`: how long a connection took, which is one round trip. Known of servers whose protocol is not spoken
    here, and of object stores, where a small read takes much longer than a round trip.
    """

    tier: str
    url: str
    link: Link | None = None
    connect_s: float | None = None
    problem: str | None = None


class FormatEvidence(Struct, frozen=True, kw_only=True):
    """Heads of objects in a tier. `foreign`: what this release does not read, in words, with counts."""

    tier: str
    looked_at: int
    foreign: tuple[tuple[str, int], ...] = ()
    problem: str | None = None  # why nothing could be looked at


class Deployment(Struct, frozen=True, kw_only=True):
    """What is to go, or went, into production. `sources`: the files and URLs that say so."""

    sources: tuple[str, ...] = ()
    policy: str
    tiers: tuple[TierEvidence, ...] = ()
    roles: tuple[str, ...] = ()  # of workers, where they differ: prefill, decode
    memory: tuple[tuple[str, MemoryVerdict], ...] = ()  # caches in host memory, by what asks for them
    keys_lack_revision: str | None = None  # a tier implementation whose keys do not tell revisions apart


class Limits(Struct, frozen=True, kw_only=True):
    """What an operator states beforehand; None: not stated, and then the answer that needs it is unknown."""

    cold_ttft_ms: float | None = None
    prefix_tokens: int = 2048  # a usual shared prefix, where no run says how long they are
    kv_bytes_per_token: float | None = None


class Dossier(Struct, frozen=True, kw_only=True):
    """All of it. `contract_blind`: members of the contract that do not change a key although they should (none)."""

    runs: tuple[RunEvidence, ...] = ()
    blocks: tuple[BlocksEvidence, ...] = ()
    drills: tuple[DrillEvidence, ...] = ()
    deployment: Deployment
    probes: tuple[ProbeEvidence, ...] = ()
    rates: tuple[Prefill, ...] = ()  # how fast workers compute, slowest first
    formats: tuple[FormatEvidence, ...] = ()
    contract_blind: tuple[str, ...] = ()
    facts: Facts | None = None  # None: no fleet was examined
    findings: tuple[Finding, ...] = ()
    limits: Limits = Limits()

    @property
    def shared_tiers(self) -> tuple[TierEvidence, ...]:
        """Those that more than one host can reach."""
        return tuple(tier for tier in self.deployment.tiers if tier.medium not in ("cpu",))

    def finding(self, code: str) -> tuple[Finding, ...]:
        """Of the doctor, for the fleet or for every worker."""
        return tuple(found for found in self.findings if found.code == code)

    def drilled(self, *names: str) -> tuple[DrillEvidence, ...]:
        return tuple(drill for drill in self.drills if drill.drill in names)
