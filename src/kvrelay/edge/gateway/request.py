"""The life of one client request between its exchange, the router and a worker.

    begin -> (tokens) -> RequestArrived -> dispatch -> head -> body ... -> end -> RequestFinished
                                             ^          |
                                             +-- AttemptFailed, until the first body byte

The worker's head is kept back until its first body byte: until then another worker can still take over unseen.
Answers that say "not now" or "I failed" (429, 5xx) are kept back whole, for the router to retry or to pass through.

A body that is too large to be held (`exchange.upload`) is routed by what its first bytes say and passed on as it comes
(`body_relay.py`); such a request has one attempt that is accepted, and no second.

A stream whose client did not ask for token counts is counted all the same (`unasked_usage.py`). If that question turns
out to show, the same worker is asked again with the body as it was sent: still one attempt, as nothing has passed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from kvrelay.core.model.effects import BreakOff, Dispatch, Refuse
from kvrelay.core.model.events import (
    AttemptAccepted,
    AttemptFailed,
    CanGoOn,
    CannotGoOn,
    ClientLeft,
    FirstTokenSeen,
    RequestArrived,
    RequestCut,
    RequestFinished,
)
from kvrelay.core.model.prompt import Prompt, Tenant, Usage
from kvrelay.core.model.units import Fault
from kvrelay.core.routing.epochs import FIRST
from kvrelay.edge.gateway.body_relay import BodyRelay
from kvrelay.edge.gateway.forms import is_form, model_of_form
from kvrelay.edge.gateway.gave_up import gave_up, gave_up_at_once
from kvrelay.edge.gateway.heads import (
    RequestHead,
    Route,
    client_headers,
    is_event_stream,
    retry_after_s,
    worker_request,
)
from kvrelay.edge.gateway.host import RouterHost
from kvrelay.edge.gateway.kv_report import KvReportQuestion
from kvrelay.edge.gateway.migration import StreamFollower, follow
from kvrelay.edge.gateway.openai import RequestBody, Unscored, read_body, with_salt
from kvrelay.edge.gateway.scoring import prompt_at_once, prompt_in_time
from kvrelay.edge.gateway.stream import StreamWatch, says_nothing_yet
from kvrelay.edge.gateway.unasked_usage import UsageFilter, asking, editable, speaks_of_question
from kvrelay.edge.http.client import Call, CallTimeouts, UpstreamPool
from kvrelay.edge.http.exchange import Exchange
from kvrelay.edge.http.heads import Header, chunk, end_to_end, last_chunk
from kvrelay.edge.http.upload import Upload
from kvrelay.edge.observe.tracing.tracing import Tracing
from kvrelay.edge.tokens.service import TokenService

JSON: Header = (b"content-type", b"application/json")
CHUNKED = b"transfer-encoding: chunked\r\n"
SENT_ONCE = "its body was passed on as it came and cannot be sent again"
TOTAL_TIME_OVER = "the request took longer than it may in all"
PATIENCE_WITH_GONE_S = 10.0  # with the silence of a worker whose probes fail
MAX_HELD_BYTES = 1024 * 1024
MAX_UNSAID_BYTES = 1024  # some events; more of them would be an answer without text
MAX_COUNTED_BODY_BYTES = 8 * 1024 * 1024
BACK_PRESSURE_STATUS = frozenset((429, 503))
log = logging.getLogger(__name__)


class Surroundings(Struct, frozen=True):
    """What all requests of a gateway share."""

    host: RouterHost
    pool: UpstreamPool
    tokens: TokenService
    route_of: Callable[[str], Route]
    timeouts: CallTimeouts
    total_s: float
    draw: Callable[[], int]
    forwards_credentials: bool
    migrates: bool
    tracing: Tracing | None
    spawn: Callable[[Any], asyncio.Task[None]]


class ClientRequest:
    """Listens to its worker's answer, is addressed by the router's effects, and hears when its client leaves."""

    __slots__ = (
        "_around",
        "_attempt",
        "_begun_followed",
        "_body",
        "_body_relay",
        "_call",
        "_counted",
        "_counted_bytes",
        "_cut_because",
        "_dispatch",
        "_epoch",
        "_exchange",
        "_filter",
        "_first_token_by_s",
        "_followed",
        "_follower",
        "_gave_up",
        "_head",
        "_held",
        "_held_bytes",
        "_hides_usage",
        "_holding",
        "_id_bytes",
        "_paused",
        "_relaying",
        "_request_id",
        "_route",
        "_second_asking",
        "_sent_body",
        "_status",
        "_stream_options",
        "_tenant",
        "_trailers",
        "_unarrived",
        "_unsaid",
        "_upstream_headers",
        "_waiting",
        "_watch",
        "deadline_s",
        "decision_us",
    )

    _upstream_headers: list[Header]
    _held: list[bytes]
    _counted: list[bytes]
    _trailers: list[Header]
    _watch: StreamWatch | None

    def __init__(
        self, around: Surroundings, exchange: Exchange, head: RequestHead, request_id: str, tenant: Tenant
    ) -> None:
        now_s = around.host.clock()
        self.deadline_s = now_s + around.total_s
        self._first_token_by_s = None if head.deadline_ms is None else now_s + head.deadline_ms / 1000
        self._around = around
        self._exchange = exchange
        self._head = head
        self._request_id = request_id
        self._id_bytes = request_id.encode("latin-1")
        self._tenant = tenant
        self._epoch = FIRST
        self._body = exchange.body
        self._body_relay: BodyRelay | None = None
        self._waiting: asyncio.Task[None] | None = None
        self._unarrived: RequestBody | None = None
        self._call: Call | None = None
        self._dispatch: Dispatch | None = None
        self._route: Route | None = None
        self._attempt = 0
        self.decision_us: float | None = None
        self._relaying = False
        self._hides_usage = False
        self._stream_options: bytes | None = None
        self._second_asking = False
        self._filter: UsageFilter | None = None
        self._follower: StreamFollower | None = None
        self._begun_followed = False
        self._sent_body = b""
        self._paused = False
        self._cut_because: str | None = None
        self._forget_answer()

    # --- from arrival to the router ----------------------------------------------------------------------------------

    def begin(self) -> None:
        exchange = self._exchange
        exchange.on_gone = self._client_left
        exchange.on_flow = self._client_flow
        self._around.host.requests[self._request_id] = self
        if exchange.upload is not None:
            self._begin_upload(exchange.upload)
            return
        body, salt = self._read_body()
        router = self._around.host.router
        adapter = router.adapter_of(body.model)
        if router.draining:  # it will be refused, so its tokens are not worth knowing
            self._arrive(body, Prompt(None, {}, "gateway_draining"), adapter)
            return
        prompt = prompt_at_once(router, self._around.tokens, body, adapter, salt)
        if prompt is None:
            self._unarrived = body
            self._waiting = self._around.spawn(self._score_and_arrive(body, salt))
        else:
            self._arrive(body, prompt, adapter)

    def _begin_upload(self, upload: Upload) -> None:
        if self._around.host.router.draining:  # it will be refused, so its body is not asked for
            self._arrive(RequestBody(Unscored("body_streamed")), Prompt(None, {}, "gateway_draining"), None)
            return
        self._unarrived = RequestBody(Unscored("body_streamed"))
        self._body_relay = BodyRelay(upload, self._upload_began)
        self._body_relay.begin()

    def _upload_began(self) -> None:
        assert self._body_relay is not None
        first = self._body_relay.first
        model = model_of_form(first) if is_form(self._exchange.header(b"content-type")) else None
        body, self._unarrived = RequestBody(Unscored("body_streamed"), model=model), None
        adapter = self._around.host.router.adapter_of(model)
        self._arrive(body, Prompt(None, {}, "body_streamed"), adapter)

    def _read_body(self) -> tuple[RequestBody, str | None]:
        """What the body says, and the salt that the engine will see."""
        if self._head.encoded_body:
            return RequestBody(Unscored("compressed_body")), None
        body = read_body(self._exchange.path, self._body)
        self._hides_usage = body.hides_usage and not self._head.sealed_body
        self._stream_options = body.stream_options
        if body.model is None and is_form(self._exchange.header(b"content-type")):
            body = msgspec.structs.replace(body, model=model_of_form(self._body))
        self._epoch = self._epoch_of(body)
        tenant_salt = self._around.host.router.epochs.salted(self._tenant, self._epoch).salt
        if tenant_salt is None:
            return body, body.cache_salt
        salted = with_salt(self._exchange.body, tenant_salt)
        if salted is None:
            return body, None
        self._body, salt = salted
        return body, salt

    def _epoch_of(self, body: RequestBody) -> str:
        router = self._around.host.router
        return router.epochs.tag(self._tenant.name, router.adapter_of(body.model))

    async def _score_and_arrive(self, body: RequestBody, salt: str | None) -> None:
        try:
            prompt = await prompt_in_time(self._around.host.router, self._around.tokens, body, salt)
        except Exception as mistake:  # ours, or a library's: it costs the match, not the request
            log.error("tokenizing for request %s failed: %s", self._request_id, _where(mistake))
            prompt = Prompt(None, {}, "tokenizer_failed")
        router = self._around.host.router
        if self._epoch != self._epoch_of(body):  # rotated meanwhile; it arrives only now, and so in the new one
            body, salt = self._read_body()
            again = prompt_at_once(router, self._around.tokens, body, router.adapter_of(body.model), salt)
            prompt = again or Prompt(None, {}, "epoch_rotated")
        self._waiting = self._unarrived = None
        self._arrive(body, prompt, router.adapter_of(body.model))

    def _arrive_as_it_is(self) -> None:
        """It ends before its tokens, or its first bytes, are known, and gets its receipt like any other."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.cancel()
        body, self._unarrived = self._unarrived, None
        assert body is not None
        self._arrive(body, Prompt(None, {}, "ended_before_tokens"), self._around.host.router.adapter_of(body.model))

    def _arrive(self, body: RequestBody, prompt: Prompt, adapter: str | None) -> None:
        host = self._around.host
        if self._around.migrates and body.streams and not self._head.sealed_body:
            self._follower = follow(self._exchange.path, self._body)
        host.feed(
            RequestArrived(
                request_id=self._request_id,
                prompt=prompt,
                model=body.model,
                adapter=adapter,
                session_id=self._head.session_id,
                tenant=self._tenant,
                path=self._exchange.path,
                priority=self._head.priority,
                deadline_ms=self._deadline_ms(),
                epoch=self._epoch,
                draw=self._around.draw(),
            )
        )

    def _deadline_ms(self) -> float | None:
        """What is left of the client's time for a first token: tokenizing, or a slow upload, may have taken some."""
        if self._first_token_by_s is None:
            return None
        return float(round((self._first_token_by_s - self._around.host.clock()) * 1000))

    # --- what the router asks for ------------------------------------------------------------------------------------

    def dispatch(self, effect: Dispatch) -> None:
        if self._exchange.gone:  # left while its prompt was being tokenized
            self._leave(())
            return
        self._dispatch = effect
        self._attempt = effect.attempt
        if self._cut_because is not None:  # cut while its prompt was being tokenized
            self._feed_cut(self._cut_because)
            return
        if self.deadline_s == math.inf:  # its time ended while its prompt was being tokenized
            self._fail(Fault.TOTAL_TIMEOUT, TOTAL_TIME_OVER)
            return
        self._route = route = self._around.route_of(effect.worker.name)
        self._second_asking = False
        self._sent_body = body = self._body_for(route, effect)
        edited = None
        if self._hides_usage and route.learned.counts_unasked:
            edited = asking(body, self._stream_options)
        self._filter = None if edited is None else UsageFilter()
        self._ask(route, effect, body if edited is None else edited)

    def _body_for(self, route: Route, effect: Dispatch) -> bytes:
        """The request as it came, or what continues its stream; where that is followed, asked so that it can be."""
        follower = self._follower
        if follower is None:
            return self._body
        body = follower.continuation() if effect.continues else self._body
        follower.begin(continues=effect.continues)
        return follower.asking(body, shows_ids=route.connector.shows_token_ids)

    def _ask(self, route: Route, effect: Dispatch, body: bytes) -> None:
        watch = self._watch
        self._forget_answer()
        exchange, relay = self._exchange, self._body_relay
        framing = None
        if relay is not None:
            framing, body = relay.framing, relay.framed_first()
        elif exchange.trailers:
            framing, body = CHUNKED, (chunk(body) if body else b"") + last_chunk(exchange.trailers)
        if effect.continues and watch is not None:
            self._watch = watch
            watch.go_on()
        forwarded: Sequence[bytes] = self._head.forwarded
        extra = self._extra_lines(route, effect)
        if self._around.tracing is not None:
            forwarded, line = self._around.tracing.onward(self._request_id, effect.attempt, forwarded)
            extra += line
        payload = worker_request(
            route,
            method=exchange.method,
            target=exchange.target,
            forwarded=forwarded,
            extra=extra,
            body=body,
            framing=framing,
        )
        self._call = call = self._around.pool.request(
            route.origin,
            payload,
            self,
            self._around.timeouts,
            head=exchange.method == "HEAD",
            on_writable=None if relay is None else relay.set_flow,
        )
        if relay is not None:
            relay.attempt(call)
        if self._paused:
            call.set_flow(False)

    def refuse(self, effect: Refuse) -> None:
        self.cancel()
        headers = [
            (b"content-type", b"application/json"),
            (b"x-kvrelay-request-id", self._id_bytes),
            (b"x-kvrelay-reason", effect.reason.encode("latin-1")),
        ]
        if effect.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % math.ceil(effect.retry_after_s)))
        message = f"no worker answered this request: {effect.reason}"
        self._exchange.respond(effect.http_status, headers, error_body(message, "kvrelay_error", effect.http_status))

    def pass_through(self) -> None:
        assert self._dispatch is not None and self._route is not None
        headers = client_headers(self._status, self._upstream_headers, self._id_bytes, self._dispatch, self._route)
        self._exchange.start(self._status, headers, b"".join(self._held))
        self._exchange.finish(self._trailers)

    def break_off(self, effect: BreakOff) -> None:
        self.cancel()
        if self._cut_because is not None and self._ends_between_events():
            message = f"this gateway is shutting down and broke the answer off: {effect.reason}"
            self._exchange.write(b"data: " + error_body(message, "kvrelay_error", 503) + b"\n\n")
        self._exchange.abort()

    def _ends_between_events(self) -> bool:
        """Whether one more event can be said in the stream before it breaks off. In the middle of one it would only
        garble what the client has."""
        if self._watch is None or not editable(self._upstream_headers):
            return False
        return self._watch.tail().endswith((b"\n\n", b"\r\n\r\n"))

    def cancel(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.abort()
        if self._body_relay is not None:
            self._body_relay.close()

    def hasten(self, attempt: int) -> None:
        if self._call is not None and attempt == self._attempt:
            self._call.hasten(PATIENCE_WITH_GONE_S)

    def expire(self) -> None:
        """The total time is over."""
        self.deadline_s = math.inf
        if self._unarrived is not None:
            self._arrive_as_it_is()  # `dispatch` will find it too late
            return
        self.cancel()
        self._fail(Fault.TOTAL_TIMEOUT, TOTAL_TIME_OVER)

    def cut(self, reason: str) -> None:
        """The gateway ends it, because it is being shut down itself."""
        self._cut_because = reason
        if self._waiting is not None:
            self._arrive_as_it_is()  # `dispatch` will find it cut, unless the router refuses it
            return
        self._feed_cut(reason)

    def _feed_cut(self, reason: str) -> None:
        gaps_ms = () if self._watch is None else tuple(self._watch.gaps_ms)
        status = self._status if self._relaying else None
        self._around.host.feed(RequestCut(self._request_id, reason, self._relaying, status, gaps_ms))

    # --- what the worker answers -------------------------------------------------------------------------------------

    def on_accepted(self) -> None:
        if self._body_relay is not None:
            self._body_relay.accepted()
        self._around.host.feed(AttemptAccepted(self._request_id, self._attempt, self.decision_us))

    def on_interim(self, status: int, headers: list[Header]) -> None:
        self._exchange.interim(status, end_to_end(headers))

    def on_head(self, status: int, headers: list[Header]) -> None:
        self._status = status
        self._upstream_headers = headers
        if self._follower is not None and not self._follow(status, headers):
            return
        if is_for_router(status):
            self._holding = True
        elif self._filter is not None and not self._passes_edited(status, headers):
            return
        elif self._second_asking and status < 400:
            self._learn_that_question_shows()
        if is_event_stream(headers) and not self._holding and self._watch is None:
            self._watch = StreamWatch()

    def _follow(self, status: int, headers: list[Header]) -> bool:
        """False: this was to continue a stream, and is none."""
        self._followed = status < 400 and is_event_stream(headers) and editable(headers)
        if self._relaying and not self._followed and not is_for_router(status):
            self.cancel()
            self._fail(Fault.NOT_CONTINUED, f"answered {status} to what continues a stream", http_status=status)
            return False
        return True

    def on_data(self, data: bytes) -> None:
        if not self._relaying and not self._holding and self._status < 400 and gave_up_at_once(data):
            self._gave_up = self._holding = True
            self._hold(self._take_unsaid())
        if self._holding:
            self._hold(data)
            return
        passed = data if self._filter is None else self._filter.take(data)
        if self._followed:
            assert self._follower is not None
            passed = self._follower.take(passed)
        if self._relaying:
            self._exchange.write(passed)
        elif passed and not self._keeps_for_now(passed):
            self._start_relaying(self._take_unsaid() + passed)
        if self._followed and self._fails_in_its_stream():
            return
        watch = self._watch
        if watch is None:
            self._count(data)
        elif watch.take(data, self._around.host.clock()):
            self._around.host.feed(FirstTokenSeen(self._request_id))

    def on_end(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            self._trailers = call.trailers
        if self._body_relay is not None:
            self._body_relay.close()
        if (
            self._holding
            and self._filter is not None
            and not self._relaying
            and speaks_of_question(b"".join(self._held))
        ):
            self._ask_as_sent()
            return
        if is_for_router(self._status) or (self._gave_up and self._holding):
            whole = not self._holding  # it was too long to be kept back
            if whole:
                self._exchange.finish(self._trailers)
            fault = Fault.BACK_PRESSURE if self._status in BACK_PRESSURE_STATUS else Fault.SERVER_ERROR
            hint_s = retry_after_s(self._upstream_headers)
            self._fail(fault, "", http_status=self._status, retry_after=hint_s, whole=whole)
            return
        rest = b"".join(self._held) if self._filter is None or self._holding else self._filter.rest()
        if self._followed:
            assert self._follower is not None
            rest = self._follower.take(rest) + self._follower.take_rest()
            if not self._follower.ended:
                self._fail(Fault.RESET, "the stream ended before its end")
                return
        if not self._relaying:
            self._start_relaying(self._take_unsaid() + rest)
        elif rest:
            self._exchange.write(rest)
        self._exchange.finish(self._trailers)
        assert self._route is not None
        if self._watch is None or self._route.kv_report is None:
            self._finish(None)
        else:
            self.deadline_s = math.inf
            KvReportQuestion(self._finish).ask(self._around.pool, self._route.kv_report, self._request_id)

    def _finish(self, kv_report: bytes | None) -> None:
        gaps_ms = () if self._watch is None else tuple(self._watch.gaps_ms)
        given_up = self._watch is not None and gave_up(self._watch.tail())
        usage = self._usage()
        if kv_report is not None:
            assert self._route is not None
            usage = self._route.connector.with_kv_report(usage, kv_report)
        self._around.host.feed(RequestFinished(self._request_id, self._status, usage, gaps_ms, given_up))

    def on_error(self, fault: Fault, detail: str) -> None:
        self._call = None
        if self._body_relay is not None:
            self._body_relay.close()
        if self._relaying and self._watch is not None and self._watch.is_complete():
            self.on_end()  # nothing but the end of the body is missing
        elif not self._closes_for_its_worker():
            self._fail(fault, detail)

    def _closes_for_its_worker(self) -> bool:
        """A worker that was lost behind its whole answer had only the end of the stream left to say."""
        if not self._relaying or not self._followed:
            return False
        assert self._follower is not None
        closing = self._follower.closing()
        if closing is None:
            return False
        self._exchange.write(closing)
        self._exchange.finish(self._trailers)
        self._finish(None)
        return True

    def _fails_in_its_stream(self) -> bool:
        """The worker has said that it cannot go on, in a stream that it ends as if all were well."""
        assert self._follower is not None
        if self._follower.failed is None:
            return False
        self.cancel()
        if not self._closes_for_its_worker():
            self._fail(Fault.SERVER_ERROR, self._follower.failed)
        return True

    # --- what the client does ----------------------------------------------------------------------------------------

    def _client_left(self) -> None:
        if self._unarrived is not None:
            self._arrive_as_it_is()  # `dispatch` will find the client gone
            return
        if self._watch is not None and self._watch.is_complete():
            return  # it has its whole answer, and some clients do not wait for the end of the body after that
        self._leave(() if self._watch is None else tuple(self._watch.gaps_ms))

    def _client_flow(self, wanted: bool) -> None:
        self._paused = not wanted
        if self._call is not None:
            self._call.set_flow(wanted)

    def _leave(self, gaps_ms: tuple[float, ...]) -> None:
        spoilt = self._exchange.spoilt
        if spoilt is None:
            self._around.host.feed(ClientLeft(self._request_id, gaps_ms))
        else:
            self._around.host.feed(ClientLeft(self._request_id, gaps_ms, spoilt.http_status, spoilt.reason))

    # --- inside ------------------------------------------------------------------------------------------------------

    def _forget_answer(self) -> None:
        self._status = 0
        self._upstream_headers = []
        self._unsaid = b""
        self._held = []
        self._held_bytes = 0
        self._holding = False
        self._followed = False
        self._gave_up = False
        self._counted = []
        self._counted_bytes = 0
        self._watch = None
        self._trailers = []

    def _extra_lines(self, route: Route, effect: Dispatch) -> bytes:
        """A gateway without keys of its own lends nobody the worker's: it passes on what its clients bring."""
        head = self._head
        lines = b""
        if not self._around.forwards_credentials:
            lines = route.authorization_line or b""
        else:
            if head.authorization is not None:
                lines = b"authorization: %b\r\n" % head.authorization
            if head.api_key is not None:
                lines += b"x-api-key: %b\r\n" % head.api_key
        if not head.names_itself:
            lines += b"x-request-id: %b\r\n" % self._id_bytes
        if head.takes_trailers:
            lines += b"te: trailers\r\nconnection: te\r\n"
        if effect.rank is not None:
            lines += b"x-data-parallel-rank: %d\r\n" % effect.rank
        return lines

    def _keeps_for_now(self, passed: bytes) -> bool:
        """The client is told of a stream with the first event that says something: until then anybody may be asked.
        A followed stream can go on elsewhere anyhow."""
        if self._watch is None or self._followed or len(self._unsaid) + len(passed) > MAX_UNSAID_BYTES:
            return False
        if not says_nothing_yet(passed):
            return False
        self._unsaid += passed
        return True

    def _take_unsaid(self) -> bytes:
        unsaid, self._unsaid = self._unsaid, b""
        return unsaid

    def _start_relaying(self, first: bytes) -> None:
        assert self._dispatch is not None and self._route is not None
        self._relaying = True
        self._begun_followed = self._followed
        headers = client_headers(self._status, self._upstream_headers, self._id_bytes, self._dispatch, self._route)
        self._exchange.start(self._status, headers, first)

    def _passes_edited(self, status: int, headers: list[Header]) -> bool:
        """Whether the answer to an edited request goes on; False when it was asked for again as it was sent."""
        if status >= 400:
            self._holding = True  # until it is known whether it is about our question
        elif not is_event_stream(headers):
            self._filter = None
        elif not editable(headers):
            self.cancel()
            self._learn_that_question_shows()
            self._ask_as_sent()
            return False
        return True

    def _ask_as_sent(self) -> None:
        assert self._route is not None and self._dispatch is not None and not self._relaying
        self._filter = None
        self._second_asking = True
        self._ask(self._route, self._dispatch, self._sent_body)

    def _learn_that_question_shows(self) -> None:
        """Of two requests that differ in the question only, the one without it was answered."""
        assert self._route is not None
        self._route.learned.counts_unasked = False

    def _hold(self, data: bytes) -> None:
        """An answer that grows too long to be held goes to the client: from then on nothing can be tried elsewhere."""
        self._held_bytes += len(data)
        self._held.append(data)
        if self._held_bytes <= MAX_HELD_BYTES:
            return
        if self._relaying:  # the client is in the middle of a stream that this does not continue
            self._held = []
            return
        self._holding = False
        self._filter = None
        self._start_relaying(b"".join(self._held))
        self._held = []

    def _count(self, data: bytes) -> None:
        """A whole answer is read for its counts at its end, unless it is so large that none are to be expected."""
        self._counted_bytes += len(data)
        if self._counted_bytes <= MAX_COUNTED_BODY_BYTES:
            self._counted.append(data)
        else:
            self._counted = []

    def _usage(self) -> Usage:
        assert self._route is not None
        if self._watch is not None:
            taken_out = b"" if self._filter is None else self._filter.usage_event
            usage = self._route.connector.usage_from_sse(taken_out or self._watch.tail())
            return usage if self._follower is None else self._follower.usage(usage)
        if self._status >= 400 or not self._counted:
            return Usage()
        return self._route.connector.usage_from_body(b"".join(self._counted))

    def _fail(
        self,
        fault: Fault,
        detail: str,
        *,
        http_status: int | None = None,
        retry_after: float | None = None,
        whole: bool = False,
    ) -> None:
        body_spent = self._body_relay is not None and self._body_relay.spent
        if body_spent:
            detail = f"{detail}; {SENT_ONCE}" if detail else SENT_ONCE
        self._around.host.feed(
            AttemptFailed(
                self._request_id,
                self._attempt,
                fault,
                http_status=http_status,
                retry_after_s=retry_after,
                detail=detail,
                relayed=self._relaying,
                rest=self._rest(),
                whole=whole,
                body_spent=body_spent,
            )
        )

    def _rest(self) -> CanGoOn | CannotGoOn | None:
        """Whether the answer, a part of which the client has, could come from another worker."""
        if not self._relaying or not self._around.migrates:
            return None
        if self._follower is None or not self._begun_followed:
            return CannotGoOn("not_a_stream_to_follow")
        return self._follower.rest()


def _where(mistake: Exception) -> str:
    """Its kind and place. Not its text, which may quote the prompt."""
    frame = traceback.extract_tb(mistake.__traceback__)[-1]
    return f"{type(mistake).__name__} at {frame.filename}:{frame.lineno}"


def is_for_router(status: int) -> bool:
    """An answer that another worker may better: the router decides before anything of it passes."""
    return status == 429 or status >= 500


def error_body(message: str, kind: str, code: int) -> bytes:
    """The shape in which OpenAI clients expect an error."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": code}})
