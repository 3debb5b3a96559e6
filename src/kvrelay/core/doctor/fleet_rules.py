"""Do the workers fit each other, the machine, and the policy that is asked for?"""

from __future__ import annotations

from collections.abc import Mapping

from kvrelay.core.doctor.engine_rules import difference
from kvrelay.core.doctor.facts import Facts, WorkerFacts
from kvrelay.core.doctor.finding import FleetRule, Judged, fail, not_applicable, ok, unknown, warn
from kvrelay.core.doctor.known import PUBLISHES_EVENTS, SCORES_BY_CACHE

MEMORY_HEADROOM = 0.15  # of the machine, for everything that is not a cache
LEAST_FREE = 0.05  # of the machine, at this moment
_HOST_CACHES = {"kv_offloading_size": 2**30, "cpu_kvcache_space_bytes": 1, "swap_space_bytes": 1}
"""vLLM's settings for caches in the host's memory, of this and of earlier releases, and their units in bytes."""
_DEVICE_CACHE = "kv_cache_memory_bytes"  # of the accelerator, where there is one


def _answering(facts: Facts) -> list[WorkerFacts]:
    return [worker for worker in facts.workers if worker.problem is None]


def _policy(facts: Facts) -> Judged:
    policy = facts.router.policy if facts.router is not None and facts.router.policy is not None else facts.policy
    if policy not in SCORES_BY_CACHE:
        return not_applicable(f"`{policy}` needs no index")
    if facts.router is not None and facts.router.index_problem is not None:
        return fail(f"`{policy}`: {facts.router.index_problem}")
    workers = _answering(facts)
    if not workers:
        return unknown("no worker could be asked")
    blind = [worker.name for worker in workers if _is_blind(worker)]
    if len(blind) == len(workers):
        return fail(f"`{policy}` is asked for and of no worker a single event comes")
    if blind:
        return warn(f"`{policy}`: of {', '.join(blind)} nothing can match")
    guessed = [worker.name for worker in workers if not worker.sources]
    if guessed:
        return warn(f"`{policy}`: what {', '.join(guessed)} hold is a guess, marked `approximate`")
    return ok(f"`{policy}` has an index")


def _is_blind(worker: WorkerFacts) -> bool:
    """It should have events, and none of them can be used."""
    if not worker.sources:
        return not worker.events_switched_off and worker.engine in PUBLISHES_EVENTS
    if worker.probe is not None and worker.probe.problem is None:
        return not any(source.heard_batches for source in worker.sources) and all(
            source.connected is not None for source in worker.sources
        )
    return all(source.connected is False for source in worker.sources)


def _block_sizes(facts: Facts) -> Judged:
    sizes = {}
    for worker in _answering(facts):
        seen = {size for source in worker.sources for size in source.block_sizes}
        size = next(iter(seen), worker.said_block_size)
        if size is not None:
            sizes[worker.name] = str(size)
    return _equal(sizes, "tokens")


def _hashes(facts: Facts) -> Judged:
    workers = _answering(facts)
    algorithms = {
        worker.name: worker.cache_settings["prefix_caching_hash_algo"]
        for worker in workers
        if worker.cache_settings and worker.cache_settings.get("prefix_caching_hash_algo")
    }
    if len(set(algorithms.values())) > 1:
        return _equal(algorithms, "as hash algorithm")
    chains = {
        worker.name: worker.probe.block_hashes
        for worker in workers
        if worker.probe is not None and worker.probe.block_hashes
    }
    if len(chains) < 2:
        return (
            not_applicable("one worker's hashes cannot differ") if len(workers) < 2 else unknown("no events to compare")
        )
    if len({chain[: min(map(len, chains.values()))] for chain in chains.values()}) == 1:
        return ok(f"{len(chains)} workers give one prompt the same block hashes")
    names = " and ".join(sorted(chains)[:2])
    return warn(f"{names} give one prompt different block hashes")


def _same_tokens(facts: Facts) -> Judged:
    """Among workers that serve one model."""
    compared = 0
    for worker in _answering(facts):
        other = next((peer for peer in _answering(facts) if peer.models == worker.models), worker)
        for probe, ids in worker.tokens.items():
            theirs = other.tokens.get(probe)
            if other is worker or ids is None or theirs is None:
                continue
            if ids != theirs:
                at = {"here": f"at {other.name}", "there": f"at {worker.name}"}
                return fail(difference(probe, theirs, ids, **at))
            compared += 1
    return ok(f"{compared} texts compared") if compared else not_applicable("no two workers of one model tokenize")


def _models(facts: Facts) -> Judged:
    return _equal({w.name: ", ".join(w.models) for w in _answering(facts) if w.models}, "", different_is_fine=True)


def _versions(facts: Facts) -> Judged:
    versions = {w.name: f"{w.engine} {w.version}" for w in _answering(facts) if w.version is not None}
    return _equal(versions, "")


def _equal(said: Mapping[str, str], unit: str, *, different_is_fine: bool = False) -> Judged:
    if len(said) < 2:
        return not_applicable("fewer than two workers say it")
    if len(set(said.values())) == 1:
        return ok(f"all {next(iter(said.values()))} {unit}".rstrip())
    shown = "; ".join(f"{name}: {value}" for name, value in said.items())
    text = f"{shown} {unit}".rstrip()
    return ok(text) if different_is_fine else warn(text)


def _memory(facts: Facts) -> Judged:
    have = facts.host.memory_bytes
    names = _HOST_CACHES if facts.host.has_accelerator else {**_HOST_CACHES, _DEVICE_CACHE: 1}
    wanted = {worker.name: _cache_bytes(worker, names) for worker in _answering(facts) if worker.is_local}
    known = {name: size for name, size in wanted.items() if size is not None}
    known |= {f"tier {store.name}": store.host_memory_bytes for store in facts.host.stores if store.host_memory_bytes}
    if not known:
        return not_applicable("no worker on this machine says how much memory its cache takes")
    if have is None:
        return unknown("the memory of this machine is not known")
    total = sum(known.values())
    said = f"caches of {', '.join(known)} may take {_gib(total)} of {_gib(have)}"
    return fail(said) if total > (1 - MEMORY_HEADROOM) * have else ok(said)


def _memory_left(facts: Facts) -> Judged:
    """At this moment, whatever anybody may take later."""
    have, free = facts.host.memory_bytes, facts.host.free_bytes
    if not any(worker.is_local for worker in _answering(facts)) and not facts.host.stores:
        return not_applicable("no worker is on this machine")
    if have is None or free is None:
        return unknown("how much memory of this machine is free is not known")
    said = f"{_gib(free)} of {_gib(have)} are free"
    return fail(said) if free < LEAST_FREE * have else ok(said)


def _cache_bytes(worker: WorkerFacts, names: Mapping[str, int]) -> int | None:
    settings = worker.cache_settings or {}
    sizes = [unit * float(settings[name]) for name, unit in names.items() if _is_number(settings.get(name))]
    return round(sum(sizes)) if sizes else None


def _is_number(text: str | None) -> bool:
    return text is not None and text.replace(".", "", 1).isdigit()


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"


def _remote_tier(facts: Facts) -> Judged:
    stores = facts.host.stores
    if not stores:
        return not_applicable("no tier is configured")
    problems = [f"{store.name}: {store.problem}" for store in stores if store.problem is not None]
    if problems:
        return fail("; ".join(problems))
    times, late = [], []
    for store in stores:
        if store.write_ms is None or store.read_ms is None:
            return unknown(f"{store.name} was not measured")
        times.append(f"{store.name} writes in {store.write_ms:.1f} ms, reads in {store.read_ms:.1f} ms")
        if store.read_ms > facts.host.store_deadline_ms:
            late.append(store.name)
    said = "; ".join(times)
    return warn(f"{said}; slower than the deadline: {', '.join(late)}") if late else ok(said)


FLEET_RULES = (
    FleetRule(
        code="policy_has_index",
        setting="gateway.policy",
        asks="Can the policy that is asked for match prompts at all?",
        cause="A cache-aware policy without an index is one in name only.",
        fix="Mend the events of the workers, or ask for `least_load` or `sticky`.",
        essential=True,
        judge=_policy,
    ),
    FleetRule(
        code="block_sizes_equal",
        setting="engine",
        asks="Do all workers use one block size?",
        cause="Each size needs keys of its own for every prompt, and a shared store can share nothing between them.",
        fix="Start all workers of one model with the same block size.",
        judge=_block_sizes,
    ),
    FleetRule(
        code="hashes_equal",
        setting="engine",
        asks="Do all workers give one prompt the same block hashes?",
        cause="PYTHONHASHSEED or --prefix-caching-hash-algo differ: routing works, sharing KV between them will not.",
        fix="Set both alike for all workers, and prefer sha256_cbor.",
        judge=_hashes,
    ),
    FleetRule(
        code="tokens_equal",
        setting="engine",
        asks="Do workers of one model tokenize alike?",
        cause="They serve different revisions or templates: what one of them cached never matches at another.",
        fix="Pin one revision of model, tokenizer and chat template for all of them.",
        judge=_same_tokens,
    ),
    FleetRule(
        code="models",
        setting="workers",
        asks="Which models do the workers serve?",
        cause="They serve different models.",
        fix="Nothing, if that is meant: requests go to workers that serve their model.",
        judge=_models,
    ),
    FleetRule(
        code="versions_equal",
        setting="engine",
        asks="Do all workers run one version of one engine?",
        cause="A rolling update is under way, or was forgotten half-way.",
        fix="Finish it; until then do not share KV between versions.",
        judge=_versions,
    ),
    FleetRule(
        code="memory",
        setting="host",
        asks="Do the caches that workers on this machine may fill leave room for everything else?",
        cause="When they fill, the kernel ends the largest process: a worker.",
        fix="Lower the engine's cache (vLLM on CPU: VLLM_CPU_KVCACHE_SPACE), or move a worker away.",
        judge=_memory,
    ),
    FleetRule(
        code="memory_left",
        setting="host",
        asks="Is there memory left on this machine, with all that runs on it now?",
        cause="Caches, engines or something else have filled it; with the next burst the kernel ends a worker.",
        fix="Lower `bytes` of tiers in host memory and the engine's cache, or end what does not belong here.",
        judge=_memory_left,
    ),
    FleetRule(
        code="remote_tier",
        setting="store.tiers",
        asks="Does every tier keep and give back an object, in time?",
        cause="The store is out of reach, or slower than the deadline of a load: its hits are computed anew.",
        fix="Mend the tier or its URL, raise `store.deadline_ms`, or leave the tier out.",
        judge=_remote_tier,
    ),
)
