"""A schedule: everything that happens to one small fleet, as data. A seed makes one, a file keeps one.

First comes a time in which anything may go wrong, then everything is healed (`HEAL_S`) and must become well again.
Times are virtual seconds.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

BLOCK_TOKENS = 4
HEAL_S = 6.0
FAULTY_S = 5.0
CROWDED = 0.25  # of all schedules
HURRIED = 0.3  # of the schedules have requests with deadlines
STORES = 0.4  # of all fleets
ENCRYPTED = 0.3  # of all stores
POLICIES = ("cache_load", "cache_load", "cache_load", "sticky", "sticky_load", "least_load", "round_robin")


class TierPlan(Struct, frozen=True, kw_only=True):
    """The store that the workers share, and how they use it."""

    failure_policy: str
    write: str  # of the shared tier
    local_bytes: int  # of a tier in each worker's own memory before it; 0: there is none
    chunk_blocks: int
    piece_bytes: int  # larger chunks are several objects and a manifest
    deadline_ms: float
    break_even: bool
    read_s: float
    mixed: bool  # the last worker has other weights
    encrypted: bool = False


class FleetPlan(Struct, frozen=True, kw_only=True):
    """The fleet and its gateway."""

    workers: int
    blocks: int  # per worker; few of them: everything is evicted all the time
    replay_batches: int  # that a worker keeps
    max_active: int  # per worker; 0: no limit
    policy: str
    scorer: str
    attempts: int
    migrate: bool
    ttl_s: float | None
    queue_depth: int
    hard: bool
    queue_wait_s: float = 2.0
    max_orphans: int = 400  # per worker; small ones are reached
    store: TierPlan | None = None


class Ask(Struct, frozen=True, kw_only=True, tag="ask"):
    """A request: prefix `root`, then `turns` pieces of a conversation. `beside`: it goes to the worker of that number,
    past the gateway, so that workers meet prompts that others have stored."""

    at_s: float
    id: str
    root: int
    turns: int
    tokens: int  # of the first piece
    max_tokens: int
    session: str | None = None
    tenant: int = 0
    adapter: bool = False
    priority: int = 0
    deadline_ms: float | None = None
    leaves_after_s: float | None = None
    beside: int = -1


class Hit(Struct, frozen=True, kw_only=True, tag="hit"):
    """Something that is done to a worker (`worker` is its number) or to the gateway or the store (-1)."""

    at_s: float
    kind: str
    worker: int = -1
    amount: float = 0.0


Op = Ask | Hit


class Schedule(Struct, frozen=True, kw_only=True):
    """`seed` feeds the router's draws; the rest is spelt out. Ops are in order of time."""

    seed: int
    fleet: FleetPlan
    ops: tuple[Op, ...]


# kind -> (weight, what `amount` is drawn from)
WORKER_HITS: dict[str, tuple[int, Callable[[random.Random], float]]] = {
    "kill": (3, lambda chance: 0.0),
    "restart": (5, lambda chance: 0.0),
    "freeze": (2, lambda chance: 0.0),
    "thaw": (2, lambda chance: 0.0),
    "cut_off": (2, lambda chance: 0.0),
    "rejoin": (2, lambda chance: 0.0),
    "slow": (1, lambda chance: chance.choice((0.01, 0.2, 1.5))),
    "drain": (2, lambda chance: 0.0),
    "resume": (2, lambda chance: 0.0),
    "lose": (6, lambda chance: chance.choice((1, 1, 2, 5, 1000))),
    "double": (2, lambda chance: 0.0),
    "shuffle": (3, lambda chance: 0.0),
    "no_replay": (2, lambda chance: 0.0),
    "part_replay": (2, lambda chance: chance.choice((0, 1, 2))),
    "calm_events": (3, lambda chance: 0.0),
    "refuse_429": (2, lambda chance: chance.choice((1, 2, 5))),
    "refuse_503": (2, lambda chance: chance.choice((1, 2, 5))),
    "refuse_500": (2, lambda chance: chance.choice((1, 2))),
    "break_after": (4, lambda chance: chance.choice((0, 0, 1, 2))),
    "silent_after": (2, lambda chance: chance.choice((0, 1))),
    "reset_cache": (2, lambda chance: 0.0),
    "remove": (1, lambda chance: 0.0),
    "resync": (1, lambda chance: 0.0),
    "unheard": (1, lambda chance: 0.0),
    "stale_batch": (4, lambda chance: 0.0),
}
GATEWAY_HITS: dict[str, tuple[int, Callable[[random.Random], float]]] = {
    "restart_gateway": (1, lambda chance: 0.0),
    "close_session": (3, lambda chance: chance.randrange(4)),
    "policy": (2, lambda chance: chance.randrange(len(POLICIES))),
    "rotate_fleet": (1, lambda chance: 0.0),
    "rotate_tenant": (1, lambda chance: 0.0),
    "rotate_adapter": (1, lambda chance: 0.0),
    "rotate_revision": (1, lambda chance: 0.0),
    "stale_event": (4, lambda chance: chance.random()),
    "jump": (1, lambda chance: chance.choice((0.5, 3.0))),
}


STORE_HITS: dict[str, tuple[int, Callable[[random.Random], float]]] = {
    "store_refuse": (3, lambda chance: 0.0),
    "store_stall": (3, lambda chance: 0.0),
    "store_mend": (5, lambda chance: 0.0),
    "store_slow": (2, lambda chance: chance.choice((0.05, 0.2, 0.6))),
    "store_damaged": (4, lambda chance: chance.choice((0.0, 0.09, 0.14, 0.95, 1.0))),  # head, its members, payload
    "store_truncated": (3, lambda chance: 0.0),
    "store_phantom": (3, lambda chance: 0.0),
    "store_foreign": (4, lambda chance: 0.0),
    "store_every": (6, lambda chance: chance.choice((1, 2, 3))),  # of so many reads one is spoilt
    "store_whole": (5, lambda chance: 0.0),
    "store_partial": (2, lambda chance: 0.0),
    "store_silent": (3, lambda chance: 0.0),
    "store_full": (1, lambda chance: 0.0),
    "store_unheard": (2, lambda chance: 0.0),
    "store_kill": (4, lambda chance: chance.choice((0, 0.5, 1, 1.5, 2, 2.5))),  # a worker, in the middle of a save
    "store_evict": (4, lambda chance: chance.choice((1, 2, 3))),
}


def schedule_of(seed: int) -> Schedule:
    """The same seed, the same schedule, for ever and everywhere. Some fleets share a store: what becomes of that
    is drawn by itself, and shifts nothing else."""
    chance, of_store = random.Random(f"schedule/{seed}"), random.Random(f"store/{seed}")
    fleet = _fleet(chance)
    asks = [_ask(chance, number) for number in range(chance.randint(12, 36))]
    hits = [_hit(chance, fleet.workers) for _ in range(chance.randint(2, 14))]
    crowding = random.Random(f"crowd/{seed}")  # a stream of its own: what else a seed does stays what it is
    fleet, crowd = _crowded(crowding, fleet) if crowding.random() < CROWDED else (fleet, ())
    if of_store.random() < STORES:
        encrypted = random.Random(f"cipher/{seed}").random() < ENCRYPTED
        fleet = replace(fleet, store=replace(_store(of_store, migrates=fleet.migrate), encrypted=encrypted))
        hits += [_store_hit(of_store, fleet.workers) for _ in range(of_store.randint(2, 10))]
        asks += [_beside(of_store, number, fleet.workers) for number in range(of_store.randint(12, 32))]
    hurry = random.Random(f"deadline/{seed}")
    if hurry.random() < HURRIED:
        asks, crowd = [_hurried(hurry, ask) for ask in asks], tuple(_hurried(hurry, ask) for ask in crowd)
    ops: list[Op] = sorted((*asks, *crowd, *hits), key=lambda op: op.at_s)
    return Schedule(seed=seed, fleet=fleet, ops=tuple(ops))


def _store(chance: random.Random, *, migrates: bool) -> TierPlan:
    """A stream that goes on at a worker of other weights would be nobody's text, so they are not mixed then."""
    return TierPlan(
        failure_policy=chance.choice(("recompute", "recompute", "fallback", "fail")),
        write=chance.choice(("through", "through", "through", "back", "selective")),
        local_bytes=chance.choice((0, 0, 3_000, 100_000)),
        chunk_blocks=chance.choice((3, 4, 4)),
        piece_bytes=chance.choice((1 << 20, 1 << 20, 40)),
        deadline_ms=chance.choice((100.0, 400.0)),
        break_even=chance.random() < 0.2,
        read_s=chance.choice((0.001, 0.01, 0.04)),
        mixed=chance.random() < 0.3 and not migrates,
    )


def _beside(chance: random.Random, number: int, workers: int) -> Ask:
    """Few long prompts, so that most of them lie in the store by then."""
    ask, worker = _ask(chance, number), chance.randrange(workers)
    return replace(ask, id=f"b{number}", beside=worker, root=ask.root % 2, turns=chance.choice((3, 4)), tokens=30)


def _store_hit(chance: random.Random, workers: int) -> Hit:
    at_s = round(chance.uniform(0.3, FAULTY_S), 4)
    kind, draw = _weighted(chance, STORE_HITS)
    worker = chance.randrange(workers) if kind == "store_kill" else -1
    return Hit(at_s=at_s, kind=kind, worker=worker, amount=draw(chance))


def _fleet(chance: random.Random) -> FleetPlan:
    return FleetPlan(
        workers=chance.randint(2, 4),
        blocks=chance.choice((24, 40, 64, 200)),
        replay_batches=chance.choice((2, 8, 1000)),
        max_active=chance.choice((0, 0, 0, 1, 2)),
        policy=chance.choice(POLICIES),
        scorer=chance.choice(("predict", "predict", "weights")),
        attempts=chance.choice((1, 2, 3, 3)),
        migrate=chance.random() < 0.3,
        ttl_s=chance.choice((None, 0.5, 60.0)),
        queue_depth=chance.choice((0, 2, 8)),
        hard=chance.random() < 0.1,
    )


def _crowded(chance: random.Random, fleet: FleetPlan) -> tuple[FleetPlan, tuple[Ask, ...]]:
    """One place per worker, more requests at once than can be served in the time that they may wait, small bounds."""
    fleet = replace(
        fleet,
        max_active=1,
        queue_depth=8,
        queue_wait_s=chance.choice((0.3, 1.0)),
        max_orphans=chance.choice((1, 4, 20)),
    )
    at_s = chance.uniform(0.3, FAULTY_S)
    return fleet, tuple(
        Ask(
            at_s=round(at_s + chance.uniform(0.0, 0.05), 4),
            id=f"c{number}",
            root=chance.randrange(4),
            turns=chance.randint(1, 4),
            tokens=30,
            max_tokens=chance.choice((10, 30)),
            tenant=chance.choice((0, 1)),
            priority=chance.choice((0, 1)),
        )
        for number in range(5 * fleet.workers)
    )


def _ask(chance: random.Random, number: int) -> Ask:
    session = chance.choice((None, None, 0, 1, 2, 3))
    return Ask(
        at_s=round(chance.uniform(0.3, FAULTY_S), 4),
        id=f"r{number}",
        root=chance.randrange(4),
        turns=chance.randint(1, 4),
        tokens=chance.choice((5, 12, 30)),
        max_tokens=chance.choice((1, 2, 6)),
        session=None if session is None else f"s{session}",
        tenant=chance.choice((0, 0, 0, 1, 2)),
        adapter=chance.random() < 0.15,
        priority=chance.choice((0, 0, 1)),
        leaves_after_s=round(chance.uniform(0.0, 0.08), 4) if chance.random() < 0.15 else None,
    )


def _hurried(chance: random.Random, ask: Ask) -> Ask:
    """Deadlines that nobody can keep, that an idle worker can, and that nearly everybody can."""
    return replace(ask, deadline_ms=chance.choice((None, None, 1.0, 20.0, 60.0, 300.0)))


def _hit(chance: random.Random, workers: int) -> Hit:
    at_s = round(chance.uniform(0.3, FAULTY_S), 4)
    if chance.random() < 0.8:
        kind, draw = _weighted(chance, WORKER_HITS)
        return Hit(at_s=at_s, kind=kind, worker=chance.randrange(workers), amount=draw(chance))
    kind, draw = _weighted(chance, GATEWAY_HITS)
    return Hit(at_s=at_s, kind=kind, amount=draw(chance))


def _weighted(
    chance: random.Random, hits: dict[str, tuple[int, Callable[[random.Random], float]]]
) -> tuple[str, Callable[[random.Random], float]]:
    (kind,) = chance.choices(list(hits), [weight for weight, _ in hits.values()])
    return kind, hits[kind][1]
