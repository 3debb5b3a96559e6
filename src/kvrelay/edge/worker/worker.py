"""One mock worker: engine, event stream, faults and HTTP surface, and their common life."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from kvrelay import __version__
from kvrelay.core.engine.engine import Engine, Finished, PublishBatch
from kvrelay.core.engine.sequence import EngineRequest
from kvrelay.edge.http.server import Exchange, HttpServer, start_server
from kvrelay.edge.system.ports import LISTEN_TRIES, spare_port
from kvrelay.edge.worker.answers import RequestError, respond_error
from kvrelay.edge.worker.api import Api
from kvrelay.edge.worker.engine_host import EngineHost, TokenListener
from kvrelay.edge.worker.faults import Fault, FaultBook, parse_fault
from kvrelay.edge.worker.generation import Generation
from kvrelay.edge.worker.metrics import WorkerMetrics
from kvrelay.edge.worker.publisher import Publisher
from kvrelay.edge.worker.reply import MidFault, Reply, StreamReply, WholeReply
from kvrelay.edge.worker.spec import MockReady, MockSpec

if TYPE_CHECKING:
    from kvrelay.edge.worker.kv_store import WorkerStore

log = logging.getLogger(__name__)

ABORTS_KEPT = 1000
DEATH_DELAY_S = 0.002  # what was written must leave first
DEATH_STATUS = 70


class Worker:
    """Everything that lives in a worker's process. Use `start`, then `drain` and `stop`."""

    def __init__(self, spec: MockSpec) -> None:
        self.spec = spec
        self.started_wall_s = time.time()
        self.incarnation = f"{int(self.started_wall_s * 1000):x}-{secrets.token_hex(4)}"
        self.faults = FaultBook(spec.seed)
        self.draining = False
        self.replies: dict[int, Reply] = {}
        self._aborts: deque[dict[str, Any]] = deque(maxlen=ABORTS_KEPT)
        self._next_serial = 0
        self._publisher = None if spec.events == "none" else Publisher(spec, self.faults.withholds_batch)
        engine = Engine(spec.engine_settings())
        self.metrics = WorkerMetrics(spec, engine, incarnation=self.incarnation, started_wall_s=self.started_wall_s)
        self.host = EngineHost(engine, publish=self._publish, observer=self.metrics)
        self._server: HttpServer | None = None
        self._reopening: asyncio.Task[None] | None = None
        self._port = spec.port
        self._store = None if spec.store is None else _open_store(spec)
        self._tasks: set[asyncio.Task[None]] = set()
        for received in spec.faults:
            self.add_fault(parse_fault(received))

    async def start(self) -> MockReady:
        await self._listen()
        return MockReady(
            name=self.spec.name,
            url=f"http://{_url_host(self.spec.host)}:{self._port}",
            events=None if self._publisher is None else self._publisher.endpoint,
            replay=None if self._publisher is None else self._publisher.replay_endpoint,
            pid=os.getpid(),
            incarnation=self.incarnation,
            topic=None if self._publisher is None else self._publisher.topic,
            model=self.spec.model,
            block_size_tokens=self.spec.block_size_tokens,
        )

    async def drain(self) -> bool:
        """Refuse new generations and let the running ones end for at most `drain_s`. False: some had to be cut."""
        self.draining = True
        if self._server is None:
            return True
        return await self._server.drain(self.spec.drain_s)

    async def stop(self) -> None:
        if self._reopening is not None:
            self._reopening.cancel()
        self.host.stop()
        if self._server is not None:
            await self._server.close()
        if self._publisher is not None:
            self._publisher.close()
        if self._store is not None:
            await asyncio.gather(*self._tasks)
            self._store.close()

    # --- generations -------------------------------------------------------------------------------------------------

    def generate(self, exchange: Exchange, generation: Generation, fault: MidFault) -> None:
        """Hand all samples to the engine; the reply answers the exchange by itself."""
        serial = self._next_serial
        self._next_serial += 1
        client_id = _client_request_id(exchange, serial)
        kind = StreamReply if generation.stream else WholeReply
        reply = kind(
            exchange,
            generation,
            reply_id=generation.id_prefix + client_id,
            incarnation=self.incarnation,
            fault=fault,
            on_done=partial(self._forget, serial),
        )
        self.replies[serial] = reply
        exchange.on_gone = partial(self._client_left, serial, reply, client_id)
        requests = self._engine_requests(serial, reply)
        if self._store is None:
            reply.begin()
            self._submit(requests, reply)
        else:
            engine_ids = [request.request_id for request in requests]
            reply.tell_load = partial(self._store.reports.tell, client_id, engine_ids)
            self._keep(self._load_and_submit(serial, exchange, requests, reply, self._store))

    def _submit(self, requests: list[EngineRequest], reply: TokenListener) -> None:
        for request in requests:
            self.metrics.on_submitted(request.request_id, time.monotonic())
            self.host.submit(request, reply)

    async def _load_and_submit(
        self, serial: int, exchange: Exchange, requests: list[EngineRequest], reply: Reply, store: WorkerStore
    ) -> None:
        """Bring what the shared store has of each prompt, then do as without it, unless the client has left."""
        from kvrelay.edge.worker.kv_store import LoadRefused, StoringReply

        for request in requests:
            held = self.host.engine.payloads(request.token_ids, adapter=request.adapter, salt=request.salt)
            try:
                loaded = await store.load(request, cached_blocks=len(held))
            except LoadRefused as refusal:
                if self.replies.pop(serial, None) is not None:
                    respond_error(exchange, RequestError(500, f"KV load failed: {refusal}"))
                return
            except Exception:
                log.exception("loading from the store failed; the prompt is computed")
                continue
            if loaded is not None:
                self.host.blocks_loaded(loaded)
        if serial not in self.replies:
            store.reports.forget([request.request_id for request in requests])
        else:
            reply.begin()
            self._submit(requests, StoringReply(reply, requests, partial(self._share, store)))

    def _share(self, store: WorkerStore, request: EngineRequest, finished: Finished) -> None:
        """What the engine holds of an ended request's prompt is shared; the time it took teaches break-even."""
        if finished.prefill_s is not None:
            store.observe_prefill(finished.prompt_tokens - finished.cached_tokens, finished.prefill_s)
        payloads = self.host.engine.payloads(request.token_ids, adapter=request.adapter, salt=request.salt)
        self._keep(self._save(store, request, payloads))

    async def _save(self, store: WorkerStore, request: EngineRequest, payloads: list[bytes]) -> None:
        try:
            await store.save(request, payloads)
        except Exception:
            log.exception("storing failed")

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it to its end; the loop itself holds tasks only weakly."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def note_abort(self, request_id: str) -> None:
        """A client left before its answer was complete; seen now."""
        self.metrics.client_aborts += 1
        self._aborts.append({"request_id": request_id, "seen_at": time.monotonic()})

    def _engine_requests(self, serial: int, reply: Reply) -> list[EngineRequest]:
        generation = reply.generation
        requests = []
        for prompt_index, prompt in enumerate(generation.prompts):
            for variant in range(generation.choices_per_prompt):
                engine_id = f"{serial}-{prompt_index}-{variant}"
                max_tokens = generation.max_tokens[prompt_index]
                reply.add_choice(engine_id, prompt_index=prompt_index, max_tokens=max_tokens)
                requests.append(
                    EngineRequest(
                        request_id=engine_id,
                        token_ids=prompt,
                        max_tokens=max_tokens,
                        adapter=generation.adapter,
                        salt=generation.salt,
                        variant=variant,
                        natural_end=generation.natural_end,
                    )
                )
        return requests

    def _forget(self, serial: int) -> None:
        self.replies.pop(serial, None)

    def _client_left(self, serial: int, reply: Reply, client_id: str) -> None:
        self._forget(serial)
        self.note_abort(client_id)
        for engine_id, choice in reply.choices.items():
            if choice.finished is None:
                self.host.abort(engine_id)

    # --- faults ------------------------------------------------------------------------------------------------------

    def add_fault(self, fault: Fault) -> dict[str, Any]:
        """Switch a fault on, or do it at once; what there is to say about it."""
        if fault.kind == "corrupt_block":
            return {"corrupted_blocks": self.host.corrupt_payloads(name=fault.block_hash, every=fault.every)}
        self.faults.add(fault)
        return {}

    def close_listener_for(self, down_s: float) -> None:
        """Refuse connections as a dead worker does, then listen again. Open connections are cut."""
        if self._reopening is None or self._reopening.done():
            self._reopening = asyncio.get_running_loop().create_task(self._reopen_after(down_s))

    def die(self) -> None:
        """Like a crash: no drain, no goodbye. The answers' bytes that are written already still leave."""
        asyncio.get_running_loop().call_later(DEATH_DELAY_S, os._exit, DEATH_STATUS)

    async def _reopen_after(self, down_s: float) -> None:
        assert self._server is not None
        await self._server.close()
        await asyncio.sleep(down_s)
        await self._listen()

    # --- what the API shows ------------------------------------------------------------------------------------------

    def load_report(self, client_id: str) -> dict[str, Any] | None:
        """What the KV connector has to say of a request that has ended."""
        return None if self._store is None else self._store.reports.find(client_id)

    def kv_settings(self) -> dict[str, Any] | None:
        """What the KV connector does when a load fails, and its version; None without one."""
        if self._store is None:
            return None
        return {"load_failure_policy": self._store.failure_policy, "versions": {"kvrelay": __version__}}

    @property
    def event_source(self) -> dict[str, Any] | None:
        """The event stream as the engine describes it, or None when nothing is published."""
        publisher = self._publisher
        if publisher is None:
            return None
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": publisher.endpoint,
            "replay_endpoint": publisher.replay_endpoint,
            "topic": publisher.topic,
        }

    @property
    def shares(self) -> bool | None:
        """Whether KV is loaded from the store and saved there; None without a store."""
        return None if self._store is None else self._store.shares

    def share(self, on: bool) -> None:
        if self._store is not None:
            self._store.shares = on

    def metrics_page(self) -> bytes:
        publisher = self._publisher
        page = self.metrics.render(
            events_sent=0 if publisher is None else publisher.sent_batches,
            events_withheld=0 if publisher is None else publisher.withheld_batches,
        )
        return page if self._store is None else page + self._store.metrics()

    def state(self) -> dict[str, Any]:
        """For tests and drills. Times are of the monotonic clock, comparable between processes of one host."""
        engine, metrics, publisher = self.host.engine, self.metrics, self._publisher
        return {
            "name": self.spec.name,
            "pid": os.getpid(),
            "incarnation": self.incarnation,
            "draining": self.draining,
            "running": engine.running_requests,
            "waiting": engine.waiting_requests,
            "kv_usage_ratio": engine.kv_usage_ratio,
            "events_mode": self.spec.events_mode,
            "next_seq": None if publisher is None else publisher.next_seq,
            "aborts": list(self._aborts),
            "aborts_total": metrics.client_aborts,
            "wrong_reuse_blocks": metrics.wrong_reuse_blocks,
            "counters": {
                "prompt_tokens": metrics.prompt_tokens,
                "cached_tokens": metrics.cached_tokens,
                "generation_tokens": metrics.generation_tokens,
                "preemptions": metrics.preemptions,
                "refused_requests": metrics.refused_requests,
                "steps": metrics.steps,
                "finished": dict(metrics.finished),
                "event_batches_sent": None if publisher is None else publisher.sent_batches,
                "event_batches_withheld": None if publisher is None else publisher.withheld_batches,
            },
            "store": None if self._store is None else self._store.state(),
            "monotonic_s": time.monotonic(),
        }

    async def _listen(self) -> None:
        """On the port that it had or was given, or on a spare one: its next life is to listen there again."""
        for left in reversed(range(LISTEN_TRIES)):
            port = self._port or spare_port(self.spec.host)
            try:
                self._server = await start_server(Api(self).handle, host=self.spec.host, port=port)
                break
            except OSError as problem:
                if self._port or not left or problem.errno != errno.EADDRINUSE:
                    raise
        self._port = port

    def _publish(self, batch: PublishBatch) -> None:
        if self._publisher is not None:
            self._publisher.publish(batch)


def _open_store(spec: MockSpec) -> WorkerStore:
    """Imported on use: without a store, a worker starts without what stores need."""
    from kvrelay.edge.worker.kv_store import WorkerStore

    return WorkerStore(spec)


def _client_request_id(exchange: Exchange, serial: int) -> str:
    received = exchange.header(b"x-request-id")
    return received.decode("latin-1") if received else f"mock-{os.getpid()}-{serial}"


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
