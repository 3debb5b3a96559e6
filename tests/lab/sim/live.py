"""The gateway's own code over a transport of virtual time, with the API of the simulated world.

What runs here as in production: the data port, the parsing of heads and bodies, keys and scoring, the host with its
timers, the life of a request with its retries and its stream, token counts read from the workers' bytes, metrics and
the receipt log. What is replaced: sockets and HTTP framing on both sides, the clock, and the fleet's watch (the
simulator's), so events come decoded.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import random
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np

from kvrelay.core.engine.engine import Finished
from kvrelay.core.engine.sequence import EngineRequest
from kvrelay.core.model.effects import Dispatch, RequestReplay, RequestSnapshot
from kvrelay.core.model.events import KvBatch, SnapshotUnavailable
from kvrelay.core.model.units import Fault
from kvrelay.core.receipts.receipt import Receipt
from kvrelay.core.routing.router import Router
from kvrelay.core.routing.settings import RouterSettings
from kvrelay.edge.connectors.registry import CONNECTORS
from kvrelay.edge.fleet.view import Upstream
from kvrelay.edge.gateway.app import DataPort
from kvrelay.edge.gateway.auth import Tenants
from kvrelay.edge.gateway.heads import Route, make_route
from kvrelay.edge.gateway.host import RouterHost
from kvrelay.edge.gateway.request import Surroundings
from kvrelay.edge.http.client import CallTimeouts
from kvrelay.edge.http.exchange import Exchange
from kvrelay.edge.observe.metrics import Metrics
from kvrelay.edge.observe.receipt_log import ReceiptLog
from kvrelay.edge.system.sections import Limits
from kvrelay.lab.sim.watch import Watch
from kvrelay.lab.sim.weather import Carried, Weather
from kvrelay.lab.sim.worker import Life, Worker, WorkerSetup
from kvrelay.lab.sim.world import HostTimes, SimRequest


class LoopAgenda:
    """The loop's timers in the words of the simulator's agenda. What is due at one moment happens in the order in which
    it was put down, which the loop by itself does not promise."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._put_down = 0

    @property
    def now_s(self) -> float:
        return self._loop.time()

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        when_s = max(when_s, self._loop.time())
        heapq.heappush(self._due, (when_s, self._put_down, action))
        self._put_down += 1
        self._loop.call_at(when_s, self._do_next)

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at(self._loop.time() + delay_s, action)

    def _do_next(self) -> None:
        heapq.heappop(self._due)[2]()


class FakeCall:
    """One request to one worker: HTTP bytes in, server-sent events out, at the simulator's times."""

    trailers: tuple = ()

    def __init__(self, worker: Worker, agenda: LoopAgenda, carried: Carried, payload: bytes, listener, engine_id: str):
        self._worker, self._agenda, self._carried = worker, agenda, carried
        self._listener = listener
        self._engine_id = engine_id
        self._body = json.loads(payload.partition(b"\r\n\r\n")[2])
        self._life: Life | None = None
        self._over = False
        self._begun = False
        self._text = b""
        agenda.after(carried.request_s, self._arrive)

    def _arrive(self) -> None:
        if self._over:
            return
        life = self._worker.life
        if life is None:
            self._later(partial(self._error, Fault.CONNECT))
            return
        self._life = life
        self._listener.on_accepted()
        tokens = np.array(self._body["prompt"], dtype=np.uint32)
        life.submit(EngineRequest(self._engine_id, tokens, self._body["max_tokens"]), self)

    def on_token(self, token_id: int) -> None:
        """The last one leaves with the counts and the end of the stream, as engines batch them."""
        event = {"choices": [{"index": 0, "text": chr(token_id)}]}
        before, self._text = self._text, b"data: " + json.dumps(event).encode() + b"\n\n"
        if before:
            self._later(partial(self._data, before))
        self._later(self._flush)

    def on_finished(self, finished: Finished) -> None:
        usage = {
            "prompt_tokens": finished.prompt_tokens,
            "completion_tokens": finished.output_tokens,
            "prompt_tokens_details": {"cached_tokens": finished.cached_tokens},
        }
        last = self._text + b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"
        self._text = b""
        self._later(partial(self._data, last))
        self._later(self._end)

    def on_lost(self) -> None:
        self._later(partial(self._error, Fault.RESET))

    def _flush(self) -> None:
        if self._text:
            text, self._text = self._text, b""
            self._data(text)

    def _data(self, data: bytes) -> None:
        if self._over:
            return
        if not self._begun:
            self._begun = True
            self._listener.on_head(200, [(b"content-type", b"text/event-stream")])
        self._listener.on_data(data)

    def _end(self) -> None:
        if not self._over:
            self._over = True
            self._listener.on_end()

    def _error(self, fault: Fault) -> None:
        if not self._over:
            self._over = True
            self._listener.on_error(fault, "")

    def abort(self) -> None:
        self._over = True
        life = self._life
        if life is not None:
            self._later(lambda: life.abort(self._engine_id))

    def hasten(self, silence_s: float) -> None:
        """No worker is silent in these runs."""

    def set_flow(self, wanted: bool) -> None:
        """Clients here read as fast as they can."""

    def _later(self, action: Callable[[], None]) -> None:
        self._agenda.after(self._carried.answer_s, action)


class _Client:
    """The client's side of an exchange: throws away what it gets."""

    def send(self, data: bytes) -> None: ...
    def exchange_done(self, exchange: Exchange) -> None: ...
    def break_off(self, *, framed: bool) -> None: ...


class _NoViews:
    def views(self) -> list:
        return []


class LiveWorld:
    """Made inside a running virtual loop."""

    def __init__(
        self,
        setups: list[WorkerSetup],
        *,
        settings: RouterSettings,
        seed: int,
        tenants: Tenants,
        weather: Weather | None = None,
        times: HostTimes = HostTimes(),
        interval_s: float = 1.0,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._agenda = LoopAgenda(self._loop)
        self._weather = weather or Weather()
        self._draw, self._jitter = random.Random(seed), random.Random(f"{seed}/jitter")
        self._receipts = ReceiptLog(None, recent=100_000)
        self._exchanges: dict[str, Exchange] = {}
        self._submitted = 0
        self._attempts: dict[str, int] = {}
        self.workers: dict[str, Worker] = {}
        self._watches: dict[str, Watch] = {}
        self._routes: dict[str, Route] = {}
        metrics = Metrics()
        self.host = RouterHost(
            Router(settings),
            clock=self._loop.time,
            metrics=metrics,
            receipts=self._receipts,
            replay=self._replay,
            snapshot=self._snapshot,
        )
        around = Surroundings(
            host=self.host,
            pool=self,  # type: ignore[arg-type]
            tokens=None,  # type: ignore[arg-type]  # prompts come as token ids
            route_of=self._routes.__getitem__,
            timeouts=CallTimeouts(first_byte_s=times.first_byte_s, idle_s=times.idle_s),
            total_s=times.total_s,
            draw=lambda: self._draw.getrandbits(64),
            forwards_credentials=False,
            migrates=False,
            tracing=None,
            spawn=self._loop.create_task,
        )
        self._port = DataPort(
            around, _NoViews(), tenants, self._receipts, metrics, session_header="x-session-id", limits=Limits()
        )
        for setup in setups:
            self._add(setup, interval_s)

    def _add(self, setup: WorkerSetup, interval_s: float) -> None:
        name = setup.name
        worker = self.workers[name] = Worker(setup, self._agenda, partial(self._publish, name))
        self._routes[name] = make_route(name, Upstream(f"http://{name}.sim:80", {}, CONNECTORS["mock"]))
        watch = self._watches[name] = Watch(
            worker,
            agenda=self._agenda,
            weather=self._weather,
            feed=self.host.feed,
            interval_s=interval_s,
            uniform=self._jitter.random,
        )
        worker.start()
        watch.start()

    # --- what the gateway asks of its surroundings ---

    def request(self, origin, payload: bytes, listener, timeouts, *, head: bool, on_writable) -> FakeCall:
        """As `UpstreamPool.request`."""
        assert not head and on_writable is None
        name = origin.host.removesuffix(".sim")
        request_id = payload.partition(b"x-request-id: ")[2].partition(b"\r\n")[0].decode()
        attempt = self._attempts[request_id] = self._attempts.get(request_id, 0) + 1
        worker = self.workers[name]
        asked = Dispatch(request_id, attempt, worker.life.id if worker.life else None, None, None, None)  # type: ignore[arg-type]
        carried = self._weather.attempt(self._loop.time(), asked)
        assert isinstance(carried, Carried)
        return FakeCall(worker, self._agenda, carried, payload, listener, f"{request_id}/{attempt}")

    def _publish(self, name: str, batch: KvBatch) -> None:
        self._watches[name].send(batch)

    def _replay(self, effect: RequestReplay) -> None:
        self._watches[effect.worker.name].replay(effect)

    def _snapshot(self, effect: RequestSnapshot) -> None:
        self._agenda.after(0.0, partial(self.host.feed, SnapshotUnavailable(effect.worker, effect.rank, "no agent")))

    # --- the API of the simulated world ---

    def submit(self, at_s: float, request: SimRequest) -> None:
        self._submitted += 1
        self._agenda.at(at_s, partial(self._arrive, request))

    def leave(self, at_s: float, request_id: str) -> None:
        self._agenda.at(at_s, partial(self._leave, request_id))

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        self._agenda.at(when_s, action)

    def kill(self, name: str) -> None:
        self.workers[name].kill()

    def restart(self, name: str) -> None:
        self.workers[name].kill()
        self.workers[name].start()

    def _arrive(self, request: SimRequest) -> None:
        body = {
            "model": request.model,
            "prompt": request.token_ids.tolist(),
            "max_tokens": request.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = [(b"content-type", b"application/json"), (b"x-request-id", request.request_id.encode())]
        if request.session_id is not None:
            headers.append((b"x-session-id", request.session_id.encode()))
        exchange = self._exchanges[request.request_id] = Exchange(
            _Client(),
            method="POST",
            target="/v1/completions",
            version="1.1",
            headers=headers,
            body=json.dumps(body).encode(),
            keep_alive=True,
        )
        self._port.handle(exchange)

    def _leave(self, request_id: str) -> None:
        exchange = self._exchanges[request_id]
        if not exchange.gone:
            exchange.client_left()

    async def run(self) -> list[Receipt]:
        while len(self._receipts.recent_lines(10**9)) < self._submitted:  # noqa: ASYNC110
            await asyncio.sleep(60.0)  # virtual seconds cost nothing
        self.host.close()
        lines = self._receipts.recent_lines(10**9)[::-1]
        return [msgspec.json.decode(line, type=Receipt) for line in lines]
