"""Looks at a fleet from outside, the way the router would, and writes down what it saw. Judges nothing.

Everything is asked with a deadline, all workers at the same time, and what cannot be found out stays None.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp
import msgspec
import zmq
from msgspec import Struct

from kvrelay.core.doctor.facts import Facts, HostFacts, ProbeFacts, SourceFacts, TokenizerFacts, WorkerFacts
from kvrelay.core.doctor.known import METRICS_WANTED, PUBLISHES_EVENTS
from kvrelay.edge.connectors import ask
from kvrelay.edge.connectors.base import (
    Connector,
    Description,
    EventSource,
    WorkerAnswerUnusable,
    WorkerUnreachable,
)
from kvrelay.edge.connectors.registry import CONNECTORS, detect
from kvrelay.edge.connectors.vllm.replay import NoReplay, replay
from kvrelay.edge.doctor import gateway, machine, probe, stores
from kvrelay.edge.doctor.listen import Heard, Listener
from kvrelay.edge.fleet.sessions import TlsSession
from kvrelay.edge.fleet.static import worker_access
from kvrelay.edge.fleet.watch import configured_sources, why_sources_are_refused
from kvrelay.edge.system.config import Config, WorkerConfig
from kvrelay.edge.system.urls import join_url
from kvrelay.edge.tokens.parity import PROBES
from kvrelay.edge.tokens.service import CannotTokenize

ANSWER_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 3.0
REPLAY_TIMEOUT_S = 3.0
EVENT_TIMEOUT_S = 3.0
NO_BATCH_YET = 2**62  # a replay from here on is only its end marker


class Wanted(Struct, frozen=True):
    """What is to be examined."""

    config: Config
    router_url: str | None = None
    admin_token_file: Path | None = None
    sends_probes: bool = True
    watch_s: float = 0.0  # of the gateway's traffic; 0: all since it began


async def collect(wanted: Wanted) -> Facts:
    """Never raises for what workers or a gateway do."""
    timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        router = window = None
        workers = wanted.config.workers
        if wanted.router_url is not None:
            seen = await gateway.look_at(session, wanted.router_url, wanted.admin_token_file, watch_s=wanted.watch_s)
            router, window = seen.facts, seen.window
            known = {worker.name for worker in workers} | {worker.url for worker in workers}
            more = [WorkerConfig(url=url, name=name) for name, url in seen.workers.items()]
            workers = (*workers, *(worker for worker in more if not {worker.name, worker.url} & known))
        sockets: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        around = _Around(session, sockets, machine.wide_open_ports(), secrets.randbits(64))
        try:
            examined = await asyncio.gather(
                *(_Examination(around, worker).run(wanted.sends_probes) for worker in workers)
            )
        finally:
            sockets.destroy(linger=0)
    return Facts(
        policy=wanted.config.gateway.policy,
        workers=tuple(examined),
        tokenizer=await _own_tokenizer(wanted.config),
        router=router,
        host=HostFacts(
            memory_bytes=machine.memory_bytes(),
            free_bytes=machine.free_bytes(),
            has_accelerator=machine.has_accelerator(),
            stores=await asyncio.to_thread(stores.try_tiers, wanted.config.store),
            store_deadline_ms=wanted.config.store.deadline_ms,
            declared_failure_policy=wanted.config.store.failure_policy,
        ),
        probed=wanted.sends_probes,
        window=window,
    )


class _KvSettings(Struct):
    load_failure_policy: str
    versions: dict[str, str]


class _Around(NamedTuple):
    """What all examinations share."""

    session: aiohttp.ClientSession
    sockets: zmq.Context[zmq.Socket[bytes]]
    open_ports: frozenset[int] | None
    seed: int  # of the made-up prompt


class _Examination:
    """Of one worker."""

    def __init__(self, around: _Around, worker: WorkerConfig) -> None:
        self._session = around.session
        self._tls_session = TlsSession()
        self._sockets = around.sockets
        self._open_ports = around.open_ports
        self._seed = around.seed
        self._config = worker
        self._headers: Mapping[str, str] = {}

    async def run(self, sends_probes: bool) -> WorkerFacts:
        try:
            return await self._run(sends_probes)
        finally:
            await self._tls_session.close()

    async def _run(self, sends_probes: bool) -> WorkerFacts:
        config = self._config
        known = WorkerFacts(
            name=config.name,
            url=config.url,
            wanted_block_size=config.block_size,
            events_switched_off=config.events == "none",
            is_local=machine.is_local(config.url),
            reports_kv=config.kv_report is not None,
        )
        try:
            access = worker_access(config)
            self._headers = access.headers
            if access.tls is not None:
                self._session = self._tls_session.get(ANSWER_TIMEOUT_S, access.tls)
            connector = CONNECTORS.get(config.adapter) or await detect(self._session, config.url, self._headers)
            described = await connector.describe(self._session, config.url, self._headers)
        except (WorkerUnreachable, WorkerAnswerUnusable, OSError, ValueError) as problem:
            return msgspec.structs.replace(known, problem=str(problem))
        known = msgspec.structs.replace(
            known,
            engine=described.spec.engine,
            version=described.version,
            models=(config.model,) if config.model else described.spec.models,
            has_event_stream=described.spec.engine in PUBLISHES_EVENTS,
            said_block_size=described.spec.block_size_tokens if described.spec.engine in PUBLISHES_EVENTS else None,
            sources_refused=why_sources_are_refused(described.sources, config),
            tokens=await self._tokens(connector, described),
        )
        known = await self._with_page(known, connector)
        known = await self._with_kv_settings(known)
        known = await self._with_events(known, connector, described, sends_probes)
        return self._with_ports(known)

    # --- what its HTTP port says -------------------------------------------------------------------------------------

    async def _with_page(self, known: WorkerFacts, connector: Connector) -> WorkerFacts:
        asked_s = time.time()
        try:
            answer = await ask.get(self._session, join_url(self._config.url, "/metrics"), self._headers)
        except (WorkerUnreachable, WorkerAnswerUnusable):
            return known
        ahead_s = _date_ahead_s(answer.headers.get("date"), (asked_s + time.time()) / 2)
        if answer.status != 200:
            return msgspec.structs.replace(known, has_metrics=False, clock_ahead_s=ahead_s)
        page = connector.metrics.read(answer.body.decode("utf-8", "replace"))
        reports = {name for name, spellings in connector.metrics.names.items() if spellings}
        settings = page.samples.get("cache_config", ())
        return msgspec.structs.replace(
            known,
            has_metrics=bool(page.samples),
            missing_metrics=tuple(name for name in METRICS_WANTED if name in reports and name not in page.samples),
            cache_settings=dict(settings[0].labels) if settings else None,
            clock_ahead_s=ahead_s,
        )

    async def _with_kv_settings(self, known: WorkerFacts) -> WorkerFacts:
        if self._config.kv_report is None:
            return known
        try:
            told = await ask.get_json(self._session, join_url(self._config.kv_report, "/settings"), {}, _KvSettings)
        except (WorkerUnreachable, WorkerAnswerUnusable):
            return known
        policy = told.load_failure_policy
        return msgspec.structs.replace(known, load_failure_policy=policy, kv_versions=told.versions)

    async def _tokens(self, connector: Connector, described: Description) -> dict[str, tuple[int, ...] | None]:
        found: dict[str, tuple[int, ...] | None] = {}
        models = (self._config.model,) if self._config.model else described.spec.models
        for name, text in PROBES.items():
            payload = {**text.payload, **({"model": models[0]} if models else {})}
            try:
                ids = await connector.tokenize(self._session, self._config.url, payload, self._headers)
                found[name] = tuple(ids.tolist())
            except (WorkerUnreachable, WorkerAnswerUnusable):
                found[name] = None
        return found

    # --- what its event sources say ----------------------------------------------------------------------------------

    async def _with_events(
        self, known: WorkerFacts, connector: Connector, described: Description, sends_probes: bool
    ) -> WorkerFacts:
        sources = configured_sources(described.sources, self._config)
        raw = await self._raw_endpoints() if described.sources else {}
        said = {source.rank: source for source in described.sources}
        async with contextlib.AsyncExitStack() as stack:
            listeners = {s.rank: await stack.enter_async_context(Listener(self._sockets, s)) for s in sources}
            connected = {rank: await one.connected(CONNECT_TIMEOUT_S) for rank, one in listeners.items()}
            replays = {source.rank: await self._replays(source) for source in sources}
            prompt = probe.made_up_prompt(self._seed, _block_size(described, self._config))
            seen: ProbeFacts | None = None
            if sends_probes:
                seen = await self._probe(connector, known, prompt, list(listeners.values()))
            facts = [
                self._source(
                    source, said.get(source.rank), raw.get(source.rank), listeners[source.rank], connector, seen
                )
                for source in sources
            ]
        facts = [
            msgspec.structs.replace(
                fact,
                connected=connected[fact.rank],
                replay_answered=None if fact.replay is None else replays[fact.rank] is None,
                replay_problem=replays[fact.rank],
            )
            for fact in facts
        ]
        facts = [await self._missed(fact, connector, prompt, seen) for fact in facts]
        return msgspec.structs.replace(known, sources=tuple(facts), probe=seen)

    async def _raw_endpoints(self) -> dict[int, str]:
        """As the worker's own configuration has them, wildcards and all."""
        url = join_url(self._config.url, "/kv_event_sources")
        try:
            answer = await ask.get_json(self._session, url, self._headers, dict[int, dict[str, object] | None])
        except (WorkerUnreachable, WorkerAnswerUnusable):
            return {}
        return {rank: str(source["endpoint"]) for rank, source in answer.items() if source and source.get("endpoint")}

    async def _replays(self, source: EventSource) -> str | None:
        """Why it cannot be asked for what was lost; None if it can."""
        if source.replay is None:
            return None
        answer = await replay(self._sockets, source.replay, topic="", from_seq=NO_BATCH_YET, timeout_s=REPLAY_TIMEOUT_S)
        return answer.reason if isinstance(answer, NoReplay) else None

    async def _probe(
        self, connector: Connector, known: WorkerFacts, prompt: tuple[int, ...], listeners: list[Listener]
    ) -> ProbeFacts:
        model = known.models[0] if known.models else None
        try:
            first = await probe.complete(self._session, connector, self._config.url, self._headers, prompt, model)
            await _any_spoke(listeners, EVENT_TIMEOUT_S)
            second = await probe.complete(self._session, connector, self._config.url, self._headers, prompt, model)
        except probe.ProbeFailed as problem:
            return ProbeFacts(prompt_tokens=len(prompt), problem=str(problem))
        hashes: tuple[int, ...] = ()
        for heard in (message for one in listeners for message in one.heard):
            batch = probe.decoded(connector, heard.payload)
            if not isinstance(batch, str):
                hashes += tuple(h for event in probe.stored_of(prompt, batch.events) for h in event.hashes)
        return probe.facts_of(prompt, first, second, hashes[: probe.BLOCKS])

    def _source(
        self,
        source: EventSource,
        said: EventSource | None,
        raw: str | None,
        listener: Listener,
        connector: Connector,
        seen: ProbeFacts | None,
    ) -> SourceFacts:
        batches = [(heard, probe.decoded(connector, heard.payload)) for heard in listener.heard]
        good = [(heard, batch) for heard, batch in batches if not isinstance(batch, str)]
        bad = [batch for _, batch in batches if isinstance(batch, str)]
        return SourceFacts(
            rank=source.rank,
            endpoint=source.endpoint,
            replay=source.replay,
            topic=source.topic,
            bind=source.bind,
            said_endpoint=None if said is None else said.endpoint,
            said_replay=None if said is None else said.replay,
            said_topic=None if said is None else said.topic,
            raw_endpoint=raw,
            why_not_tried=listener.why_not_tried,
            topics_seen=tuple(dict.fromkeys(heard.topic for heard in listener.heard)),
            heard_batches=None if seen is None else sum(_matches(heard, source.topic) for heard in listener.heard),
            malformed=listener.malformed or next(iter(bad), None),
            block_sizes=tuple(sorted({size for _, batch in good for size in probe.block_sizes(batch.events)})),
            clock_ahead_s=next((batch.published_s - heard.at_s for heard, batch in good), None),
        )

    async def _missed(
        self, fact: SourceFacts, connector: Connector, prompt: tuple[int, ...], seen: ProbeFacts | None
    ) -> SourceFacts:
        """Nothing came although something was computed: does the replay have it?"""
        if fact.heard_batches or fact.replay is None or not fact.replay_answered or seen is None or seen.problem:
            return fact
        answer = await replay(self._sockets, fact.replay, topic="", from_seq=0, timeout_s=REPLAY_TIMEOUT_S)
        if isinstance(answer, NoReplay):
            return fact
        batches = [probe.decoded(connector, payload) for _, payload in answer.messages]
        ours = [batch for batch in batches if not isinstance(batch, str) and probe.stored_of(prompt, batch.events)]
        sizes = {size for batch in ours for size in probe.block_sizes(batch.events)}
        return msgspec.structs.replace(fact, replayed_batches=len(ours), block_sizes=tuple(sorted(sizes)))

    # --- who else can reach it ---------------------------------------------------------------------------------------

    def _with_ports(self, known: WorkerFacts) -> WorkerFacts:
        if not known.is_local or self._open_ports is None:
            return known
        ports = {urlsplit(source.raw_endpoint or "").port for source in known.sources if _is_tcp(source.raw_endpoint)}
        ports |= {urlsplit(source.replay or "").port for source in known.sources if _is_tcp(source.replay)}
        wide = sorted(port for port in ports if port is not None and port in self._open_ports)
        http_port = urlsplit(self._config.url).port or 80
        return msgspec.structs.replace(
            known, http_open_to_all=http_port in self._open_ports, open_event_ports=tuple(wide)
        )


def _is_tcp(endpoint: str | None) -> bool:
    return endpoint is not None and endpoint.startswith("tcp://") and endpoint.rpartition(":")[2].isdigit()


def _matches(heard: Heard, topic: str) -> bool:
    return heard.topic.startswith(topic)


def _block_size(described: Description, config: WorkerConfig) -> int | None:
    """The larger of what is said and what is wanted: whole blocks of either are in the prompt then."""
    sizes = [size for size in (described.spec.block_size_tokens, config.block_size) if size is not None]
    return max(sizes, default=None)


def _date_ahead_s(date: str | None, our_s: float) -> float | None:
    """A Date header tells whole seconds, so on average half a second less than it was."""
    if date is None:
        return None
    try:
        return email.utils.parsedate_to_datetime(date).timestamp() + 0.5 - our_s
    except ValueError:
        return None


async def _any_spoke(listeners: list[Listener], within_s: float) -> None:
    if not listeners:
        return
    waiting = [asyncio.create_task(one.spoke()) for one in listeners]
    await asyncio.wait(waiting, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def _own_tokenizer(config: Config) -> TokenizerFacts:
    path = config.tokens.tokenizer
    if path is None:
        return TokenizerFacts()
    try:
        from kvrelay.edge.tokens.local import local_tokenizer

        tokenizer = local_tokenizer(config.tokens, cache_bytes=0)
    except (OSError, ValueError, ImportError) as problem:
        return TokenizerFacts(path=str(path), problem=str(problem))
    found: dict[str, tuple[int, ...] | None] = {}
    try:
        for name, text in PROBES.items():
            try:
                found[name] = tuple((await tokenizer.token_ids(text, None)).tolist())
            except CannotTokenize:
                found[name] = None
    finally:
        tokenizer.close()
    return TokenizerFacts(path=str(path), tokens=found)
