"""Do a worker's KV events reach the router, and can they be matched with prompts?"""

from __future__ import annotations

from kvrelay.core.doctor.facts import Facts, SourceFacts, WorkerFacts
from kvrelay.core.doctor.finding import Judged, WorkerRule, fail, not_applicable, ok, unknown, warn
from kvrelay.core.doctor.known import PUBLISHES_EVENTS


def _published(_: Facts, worker: WorkerFacts) -> Judged:
    if worker.events_switched_off:
        return warn("`events` is `none`: what it holds is guessed from what it was sent")
    if worker.sources:
        return ok(", ".join(source.endpoint for source in worker.sources))
    if worker.sources_refused is not None:
        return fail(worker.sources_refused)
    if worker.problem is not None:
        return unknown("the worker could not be asked")
    if worker.engine not in PUBLISHES_EVENTS:
        return warn(f"{worker.engine} publishes none: what the worker holds is guessed from what it was sent")
    return fail(f"{worker.engine} can publish events and names no source of them")


def _gateway_hears(facts: Facts, worker: WorkerFacts) -> bool:
    """A worker that connects to the gateway cannot be listened to by anybody else, so the gateway's word is taken."""
    believed = () if facts.router is None else facts.router.workers
    return any(one.name == worker.name and one.index_state == "live" for one in believed)


_HEARD_THERE = "the running gateway listens there, and its index is live"


def _connected(facts: Facts, worker: WorkerFacts) -> Judged:
    if not worker.sources:
        return not_applicable("no event source")
    deaf = [source for source in worker.sources if source.connected is False]
    if deaf:
        said = "; ".join(_endpoint_difference(source) for source in deaf)
        return fail(f"nothing publishes at {said}")
    untried = [source.why_not_tried or "not tried" for source in worker.sources if source.connected is None]
    if untried:
        return ok(_HEARD_THERE) if _gateway_hears(facts, worker) else unknown(untried[0])
    return ok(", ".join(source.endpoint for source in worker.sources))


def _endpoint_difference(source: SourceFacts) -> str:
    if source.said_endpoint is None or source.said_endpoint == source.endpoint:
        return source.endpoint
    return f"{source.endpoint}, the worker says {source.said_endpoint}"


def _topic(_: Facts, worker: WorkerFacts) -> Judged:
    if not worker.sources:
        return not_applicable("no event source")
    for source in worker.sources:
        topics = source.topics_seen or ((source.said_topic,) if source.said_topic is not None else ())
        foreign = [topic for topic in topics if not topic.startswith(source.topic)]
        if foreign:
            return fail(f"subscribed is `{source.topic}`, published is `{foreign[0]}`")
    if any(source.topics_seen or source.said_topic is not None for source in worker.sources):
        return ok(f"`{worker.sources[0].topic}`")
    return unknown("no event was seen and the worker does not say its topic")


def _heard(facts: Facts, worker: WorkerFacts) -> Judged:
    if not worker.sources:
        return not_applicable("no event source")
    probe = worker.probe
    if not facts.probed or probe is None:
        return unknown("no probe was sent, so none was expected")
    if probe.problem is not None:
        return unknown(f"the probe failed: {probe.problem}")
    heard = sum(source.heard_batches or 0 for source in worker.sources)
    if heard:
        return ok(f"{heard} message{'' if heard == 1 else 's'} after the probe")
    if all(source.connected is None for source in worker.sources):
        if _gateway_hears(facts, worker):
            return ok(_HEARD_THERE)
        return unknown(worker.sources[0].why_not_tried or "nobody could listen")
    replayed = sum(source.replayed_batches or 0 for source in worker.sources)
    also = f"; its replay had {replayed}" if replayed else ""
    where = " under the subscribed topic" if any(source.topics_seen for source in worker.sources) else ""
    return fail(f"the worker computed {probe.prompt_tokens} prompt tokens and no event came{where}{also}")


def _readable(_: Facts, worker: WorkerFacts) -> Judged:
    if not worker.sources:
        return not_applicable("no event source")
    malformed = next((source.malformed for source in worker.sources if source.malformed is not None), None)
    if malformed is not None:
        return fail(malformed)
    if any(source.heard_batches or source.replayed_batches for source in worker.sources):
        return ok("all that came could be decoded")
    return unknown("no event was seen")


def _replay(_: Facts, worker: WorkerFacts) -> Judged:
    if not worker.sources:
        return not_applicable("no event source")
    absent = [source for source in worker.sources if source.replay is None]
    if absent:
        return warn(f"rank {absent[0].rank} has no replay endpoint")
    for source in worker.sources:
        if source.replay_answered is False:
            said = "" if source.said_replay in (None, source.replay) else f", the worker says {source.said_replay}"
            return fail(f"{source.replay}: {source.replay_problem or 'no answer'}{said}")
    if any(source.replay_answered is None for source in worker.sources):
        return unknown("not asked")
    return ok(", ".join(source.replay or "" for source in worker.sources))


def _block_size(_: Facts, worker: WorkerFacts) -> Judged:
    seen = sorted({size for source in worker.sources for size in source.block_sizes})
    said, wanted = worker.said_block_size, worker.wanted_block_size
    if len(seen) > 1:
        return fail(f"its events carry blocks of {' and '.join(map(str, seen))} tokens")
    real = seen[0] if seen else said
    if real is None:
        return unknown("neither the worker nor an event says it")
    if wanted is not None and wanted != real:
        return fail(f"`block_size` is {wanted}, the worker's blocks have {real} tokens")
    if said is not None and said != real:
        return warn(f"the worker says {said} tokens, its events carry {real}")
    return ok(f"{real} tokens" + ("" if seen else " (by its own word)"))


def _open_publisher(_: Facts, worker: WorkerFacts) -> Judged:
    wide = [source.raw_endpoint for source in worker.sources if source.raw_endpoint and _binds_all(source.raw_endpoint)]
    if worker.open_event_ports:
        ports = ", ".join(map(str, worker.open_event_ports))
        return warn(f"port {ports} listens on all interfaces of this machine")
    if wide:
        return warn(f"{wide[0]} is bound on all interfaces")
    return ok("closed to other machines") if worker.sources else not_applicable("no event source")


def _binds_all(endpoint: str) -> bool:
    host = endpoint.partition("://")[2].rpartition(":")[0]
    return endpoint.startswith("tcp://") and host in ("*", "0.0.0.0", "::", "[::]")


EVENT_RULES = (
    WorkerRule(
        code="events_published",
        setting="events",
        asks="Does the worker publish KV events?",
        cause="Without events the router can only guess what the worker holds.",
        fix='Start the engine with its KV events on (vLLM: --kv-events-config with "enable_kv_cache_events": true).',
        essential=True,
        judge=_published,
    ),
    WorkerRule(
        code="events_endpoint",
        setting="events",
        asks="Does a publisher answer at the endpoint that the router listens to?",
        cause="`events` names another host or port than the one the worker publishes on.",
        fix='Set `events` to the endpoint that the worker says, or to "auto".',
        essential=True,
        judge=_connected,
    ),
    WorkerRule(
        code="events_topic",
        setting="topic",
        asks="Does the subscribed topic match what is published?",
        cause="`topic` is no prefix of the published topic, so every event is filtered out.",
        fix="Remove `topic`, or set it to the topic that the worker says.",
        judge=_topic,
    ),
    WorkerRule(
        code="events_heard",
        setting="events",
        asks="Did events come after the worker had computed something?",
        cause="Endpoint or topic is wrong, or something between the worker and us drops them.",
        fix="Compare `events` and `topic` with what the worker says, and look for a firewall between the two.",
        essential=True,
        judge=_heard,
    ),
    WorkerRule(
        code="events_readable",
        setting="adapter",
        asks="Could every event be decoded?",
        cause="The engine's release has another event format, or `adapter` names another engine.",
        fix='Set `adapter = "auto"`; if that does not help, use an engine version that is known.',
        judge=_readable,
    ),
    WorkerRule(
        code="replay",
        setting="replay",
        asks="Can lost events be asked for again?",
        cause="After a loss, or a restart of the router, what the worker holds is unknown until it is cached anew.",
        fix='Give the engine a replay endpoint (vLLM: "replay_endpoint"), and leave `replay = "auto"`.',
        judge=_replay,
    ),
    WorkerRule(
        code="block_size",
        setting="block_size",
        asks="Are the worker's blocks as large as the router expects?",
        cause="Keys of blocks of another size never match.",
        fix="Remove `block_size` (the worker says it), or set it to the engine's own.",
        judge=_block_size,
    ),
    WorkerRule(
        code="publisher_open",
        setting="events",
        asks="Is the event stream closed to other machines?",
        cause="Events carry the token ids of prompts and salts in clear; whoever reaches the port can read them.",
        fix="Use an ipc:// endpoint, let the worker connect to the router (`events = bind:...`), or close the port.",
        judge=_open_publisher,
    ),
)
