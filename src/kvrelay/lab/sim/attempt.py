"""The way of one attempt to a worker and back: what the gateway's HTTP client and request do, without the bytes.

The live counterparts are `edge/http/client.py` and `edge/gateway/request.py`. An answer is a stream of tokens; its
first token is the first byte that the client gets, and from then on nothing is retried unseen.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from msgspec import Struct

from kvrelay.core.engine.engine import Finished
from kvrelay.core.engine.sequence import EngineRequest
from kvrelay.core.model.effects import Dispatch
from kvrelay.core.model.events import AttemptAccepted, AttemptFailed, CanGoOn, Event, FirstTokenSeen, RequestFinished
from kvrelay.core.model.prompt import Tenant, TokenIds, Usage
from kvrelay.core.model.units import Fault
from kvrelay.edge.connectors.vllm.kv_report import with_report
from kvrelay.lab.sim.agenda import Agenda
from kvrelay.lab.sim.weather import BrokenOff, Carried, Fate, Refused, Silent
from kvrelay.lab.sim.worker import Life, Worker

MAX_GAPS = 512  # of a receipt's `itl_ms`, as the gateway keeps them
PATIENCE_WITH_GONE_S = 10.0


class SimRequest(Struct, frozen=True, eq=False, kw_only=True):
    """One request of a client. Token ids are given, as an API that takes them would."""

    request_id: str
    token_ids: TokenIds
    max_tokens: int = 1
    session_id: str | None = None
    model: str | None = None
    adapter: str | None = None
    tenant: Tenant = Tenant()
    priority: int = 0
    deadline_ms: float | None = None


class HostTimes(Struct, frozen=True, kw_only=True):
    """The gateway's timeouts."""

    first_byte_s: float = 300.0
    idle_s: float = 60.0
    total_s: float = 1800.0


class Answer:
    """What the client has got so far, over all attempts, and how it ended."""

    __slots__ = ("ending", "gaps_ms", "last_token_s", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.gaps_ms: list[float] = []
        self.last_token_s: float | None = None
        self.ending: str | None = None  # end | refused | passed_through | broken_off | left


class Attempt:
    """Listens to one engine. After its end (`over`) nothing of it is heard."""

    def __init__(
        self,
        request: SimRequest,
        answer: Answer,
        dispatch: Dispatch,
        fate: Fate,
        *,
        worker: Worker,
        agenda: Agenda,
        feed: Callable[[Event], None],
        times: HostTimes,
        migrates: bool,
    ) -> None:
        self.over = False
        self._request = request
        self._answer = answer
        self._dispatch = dispatch
        self._fate = fate
        self._worker = worker
        self._agenda = agenda
        self._feed = feed
        self._times = times
        self._migrates = migrates
        self._carried = fate.carried if isinstance(fate, BrokenOff | Silent) else fate
        self._life: Life | None = None
        self._tokens_before = len(answer.token_ids) if dispatch.continues else 0
        self._tokens_made = 0
        self._heard_token = False
        self._deadline_s = self._looks_at_s = float("inf")  # the longest silence ends; the clock is looked at

    @property
    def number(self) -> int:
        return self._dispatch.attempt

    @property
    def _engine_id(self) -> str:
        return f"{self._request.request_id}/{self.number}"

    # --- there -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        match self._carried:
            case Refused(fault, after_s, http_status, retry_after_s):
                self._agenda.after(after_s, lambda: self.fail(fault, http_status, retry_after_s))
            case Carried(request_s):
                self._agenda.after(request_s, self._arrive)

    def _arrive(self) -> None:
        if self.over:
            return
        life = self._worker.life
        if life is None:
            self._answer_later(lambda: self.fail(Fault.CONNECT))
            return
        self._life = life
        self._feed(AttemptAccepted(self._request.request_id, self.number))
        engine_request = self._engine_request()
        if not life.takes(engine_request):
            self._answer_later(self._refused_by_engine)
            return
        self._bear_until(self._agenda.now_s + self._times.first_byte_s)
        life.submit(engine_request, self)

    def _engine_request(self) -> EngineRequest:
        """The prompt, with what the client has already where this continues its stream."""
        request = self._request
        token_ids = request.token_ids
        if self._tokens_before:
            begun = np.array(self._answer.token_ids, dtype=np.uint32)
            token_ids = np.concatenate([np.asarray(token_ids, dtype=np.uint32), begun])
        return EngineRequest(
            request_id=self._engine_id,
            token_ids=token_ids,
            max_tokens=request.max_tokens - self._tokens_before,
            adapter=request.adapter,
            salt=request.tenant.salt,
        )

    # --- and back ----------------------------------------------------------------------------------------------------

    def on_token(self, token_id: int) -> None:
        self._tokens_made += 1
        fate = self._fate
        if isinstance(fate, BrokenOff | Silent) and self._tokens_made > fate.after_tokens:
            if isinstance(fate, BrokenOff) and self._tokens_made == fate.after_tokens + 1:
                self._answer_later(lambda: self.fail(fate.fault))
            return
        self._answer_later(lambda: self._hear_token(token_id))

    def on_finished(self, finished: Finished) -> None:
        report = None if self._life is None else self._life.report(finished)
        if not isinstance(self._fate, BrokenOff | Silent) or self._tokens_made <= self._fate.after_tokens:
            self._answer_later(lambda: self._end(finished, report))

    def on_lost(self) -> None:
        if not isinstance(self._fate, Silent):
            self._answer_later(lambda: self.fail(Fault.RESET))

    def on_refused(self) -> None:
        """The worker answers with an error of its own."""
        if not isinstance(self._fate, Silent):
            self._answer_later(lambda: self.fail(Fault.SERVER_ERROR, 500))

    def _hear_token(self, token_id: int) -> None:
        if self.over:
            return
        answer, now_s = self._answer, self._agenda.now_s
        self._bear_until(now_s + self._times.idle_s)
        answer.token_ids.append(token_id)
        if answer.last_token_s is not None and len(answer.gaps_ms) < MAX_GAPS:
            answer.gaps_ms.append(round((now_s - answer.last_token_s) * 1000, 3))
        answer.last_token_s = now_s
        if not self._heard_token:
            self._heard_token = True
            self._feed(FirstTokenSeen(self._request.request_id))

    def _end(self, finished: Finished, report: bytes | None) -> None:
        if self.over:
            return
        self.over = True
        prompt_tokens = len(self._request.token_ids)
        usage = Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=finished.output_tokens + self._tokens_before,
            cached_tokens=min(finished.cached_tokens, prompt_tokens),
        )
        if report is not None:
            usage = with_report(usage, report)
        self._answer.ending = "end"
        self._feed(RequestFinished(self._request.request_id, 200, usage, tuple(self._answer.gaps_ms)))

    def _refused_by_engine(self) -> None:
        if not self.over:
            self.over = True
            self._answer.ending = "end"
            self._feed(RequestFinished(self._request.request_id, 400))

    def fail(self, fault: Fault, http_status: int | None = None, retry_after_s: float | None = None) -> None:
        """It ends here, and the worker is told to stop."""
        if self.over:
            return
        self.cancel()
        relayed = bool(self._answer.token_ids)
        self._feed(
            AttemptFailed(
                self._request.request_id,
                self.number,
                fault,
                http_status=http_status,
                retry_after_s=retry_after_s,
                relayed=relayed,
                rest=CanGoOn(len(self._answer.token_ids)) if relayed and self._migrates else None,
            )
        )

    def cancel(self) -> None:
        """Close the connection: the worker hears of it a little later."""
        self.over = True
        life = self._life
        if life is not None:
            self._answer_later(lambda: life.abort(self._engine_id))

    def hasten(self) -> None:
        """Bear no long silence from now on: the worker seems to be gone."""
        times = self._times
        self._times = HostTimes(
            first_byte_s=min(times.first_byte_s, PATIENCE_WITH_GONE_S),
            idle_s=min(times.idle_s, PATIENCE_WITH_GONE_S),
            total_s=times.total_s,
        )
        if self._life is not None and not self.over:
            self._bear_until(min(self._deadline_s, self._agenda.now_s + PATIENCE_WITH_GONE_S))

    def _bear_until(self, deadline_s: float) -> None:
        """One look at the clock is on the agenda; with every token the deadline moves, and the look rarely has to."""
        self._deadline_s = deadline_s
        if deadline_s < self._looks_at_s:
            self._looks_at_s = deadline_s
            self._agenda.at(deadline_s, lambda: self._look_at_clock(deadline_s))

    def _look_at_clock(self, due_s: float) -> None:
        if self.over or due_s != self._looks_at_s:
            return
        self._looks_at_s = float("inf")
        if self._deadline_s > self._agenda.now_s:
            self._bear_until(self._deadline_s)
            return
        self.fail(Fault.IDLE_TIMEOUT if self._heard_token else Fault.FIRST_BYTE_TIMEOUT)

    def _answer_later(self, action: Callable[[], None]) -> None:
        delay_s = self._carried.answer_s if isinstance(self._carried, Carried) else 0.0
        self._agenda.after(delay_s, action)
