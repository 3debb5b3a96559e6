"""What an operator decides about routing. Pure values; the edge builds them from the configuration."""

from __future__ import annotations

from msgspec import Struct

from kvrelay.core.index.drift import DriftBounds
from kvrelay.core.model.place import HopCosts, Place
from kvrelay.core.routing.capacity import Capacity


class Weights(Struct, frozen=True):
    """Factors of the `weights` scorer. Each load term has its own unit, see `policy/cache_load.py`."""

    alpha: float = 1.0  # credit per reusable block
    beta: float = 0.002  # debit per active prefill token
    gamma: float = 0.005  # debit per active decode block
    delta: float = 0.05  # debit per ms of estimated transfer


class Spill(Struct, frozen=True):
    """When a session's worker is too busy for its next turn: more requests than `ratio` x fewest + `requests`."""

    ratio: float = 1.5
    requests: float = 4


NEVER = Spill(requests=float("inf"))


class RouterSettings(Struct, frozen=True, kw_only=True):
    """Everything `Router` needs to know beforehand. Bounds are part of it: whatever grows has a limit here."""

    policy: str = "cache_load"
    scorer: str = "predict"
    weights: Weights = Weights()
    affinity_ttl_s: float | None = 300.0
    affinity_hard: bool = False  # True: a bound session is refused rather than sent to another worker
    spill: Spill = Spill()  # of policy `sticky_load`
    max_sessions: int = 100_000
    has_siblings: bool = False  # other processes of this gateway want to know where sessions are bound
    retry_attempts: int = 3  # attempts per request, the first included
    retry_budget_ratio: float = 0.2  # retries per first attempt over the fleet, beyond a small fixed allowance
    migrate: bool = False  # continue broken streams on another worker
    place: Place = Place()  # where this gateway is
    hops: HopCosts = HopCosts()  # what the way to workers elsewhere costs
    capacity: Capacity = Capacity()  # what fills a worker that has a limit
    queue_depth: int = 0  # requests that may wait for a free place; 0: none waits
    queue_wait_s: float = 30.0
    health_failures: int = 2
    health_successes: int = 1
    speculative_deadline_s: float = 60.0
    max_orphan_blocks: int = 50_000  # per worker rank
    max_approximate_blocks: int = 200_000  # per worker rank without events
    approximate_ttl_s: float = 600.0  # how long a guess is kept without being used
    max_pending_batches: int = 10_000  # held per worker rank while a replay is under way
    replay_timeout_s: float = 5.0
    snapshot_timeout_s: float = 30.0  # an absent agent is noticed sooner by whoever asks it
    heartbeat_grace_s: float = 0.5  # an agent's heartbeat may overtake the event that it names
    census_interval_s: float = 5.0  # between two comparisons of a worker's blocks with its agent's
    drift: DriftBounds = DriftBounds()  # when claims that do not come true call for a resync
    initial_prefill_tokens_per_s: float = 8_000.0  # until a worker's own rate is learned
    key_seed: bytes = b""
    manifest_digest: str | None = None
