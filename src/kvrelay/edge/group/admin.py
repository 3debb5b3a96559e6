"""The one admin port of a group: questions are answered from all processes, changes are made in all of them.

A change is asked of one process first. If that one refuses, nothing has happened anywhere and its answer is the answer.
Otherwise the others follow, and one that does not take what the first one took is ended and begins anew from how things
stand, which has the change in it. So a change is in force everywhere, or nowhere, once it is answered.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web
from pydantic import ValidationError

from kvrelay.core.routing.epochs import EpochState
from kvrelay.edge.gateway.admin import (
    CONFIG_PATH,
    ROTATE_PATH,
    TASKS_PATH,
    WORKER_MEMBERS,
    Policy,
    admits_origin,
    problem_response,
)
from kvrelay.edge.gateway.auth import AdminToken
from kvrelay.edge.group import merge
from kvrelay.edge.group.live_source import GroupSource
from kvrelay.edge.group.member import Answer, NoAnswer
from kvrelay.edge.group.safety import refuse_bound_events
from kvrelay.edge.observe.ui.app import Ui
from kvrelay.edge.system.config import WorkerConfig
from kvrelay.edge.system.unreadable import UNREADABLE

if TYPE_CHECKING:
    from kvrelay.edge.group.group import Group

DEFAULT_RECEIPTS = 100
_PASSED_ON = ("Content-Type", "x-session-id", "x-dynamo-session-id")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Merge = Callable[[Sequence[Any]], Any]


class GroupAdmin:
    """What is not named here goes to one process if it asks (GET, /admin/match), and to all if it changes something, so
    that whatever a single gateway answers a group answers as well."""

    def __init__(self, group: Group, token: AdminToken) -> None:
        self._group = group
        self.token = token
        self._ui = Ui(GroupSource(group))

    def app(self, max_body_bytes: int) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=max_body_bytes)
        app.add_routes(
            [
                web.get("/metrics", self._metrics),
                web.get("/admin/status", self._status),
                web.get("/admin/workers", partial(self._merged, merge.merged_workers)),
                web.get("/admin/workers/{name}", partial(self._merged, merge.merged_worker)),
                web.post("/admin/workers", self._add_worker),
                web.delete("/admin/workers/{name}", self._remove_worker),
                web.post("/admin/workers/{name}/{order:drain|resume}", self._order_worker),
                web.put("/admin/policy", self._set_policy),
                web.get("/admin/sessions", partial(self._merged, merge.merged_sessions)),
                web.delete("/admin/sessions/{session_id}", self._close_session),
                web.get("/admin/receipts", self._receipts),
                web.get("/admin/receipts/{request_id}", self._receipt),
                web.post("/admin/match", self._from_one),
                web.post(ROTATE_PATH, self._rotate),
                *self._ui.routes(),
                web.route("*", "/{path:.*}", self._other),
            ]
        )
        app.on_shutdown.append(self._ui.close)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not admits_origin(request):
            return problem_response(403, "requests from other web pages are not answered")
        if not (self._ui.is_public(request) or self.token.admits(request.headers.get("Authorization"))):
            return problem_response(401, "the admin port wants its token (Authorization: Bearer TOKEN)")
        try:
            return await handler(request)
        except NoAnswer as problem:
            return problem_response(503, f"no process of this gateway answers: {problem}")
        except web.HTTPException as problem:
            return problem_response(problem.status, problem.text or problem.reason)

    # --- questions ---------------------------------------------------------------------------------------------------

    async def _metrics(self, request: web.Request) -> web.Response:
        await self._group.read_pages()
        body, content_type = self._group.pages.render_for(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _status(self, request: web.Request) -> web.Response:
        numbered = await self._group.ask_all("GET", _target(request))
        parts = {number: json.loads(answer.body) for number, answer in numbered.items() if answer.ok}
        if not parts:
            raise NoAnswer("all of them are starting or gone")
        status = merge.merged_status(list(parts.values()))
        status["gateway"] = {**status["gateway"], **self._group.describe()}
        status["config"] = msgspec.to_builtins(self._group.config_state)
        status["processes"] = self._group.describe_processes({n: part["gateway"] for n, part in parts.items()})
        return _json(status)

    async def _merged(self, merged: Merge, request: web.Request) -> web.Response:
        answers = tuple((await self._group.ask_all("GET", _target(request))).values())
        good = [json.loads(answer.body) for answer in answers if answer.ok]
        return _json(merged(good)) if good else _passed(_any(answers))

    async def _receipts(self, request: web.Request) -> web.Response:
        answers = tuple((await self._group.ask_all("GET", _target(request))).values())
        if not answers or not all(answer.ok for answer in answers):
            return _passed(_any([answer for answer in answers if not answer.ok]))
        limit = int(request.query.get("limit", DEFAULT_RECEIPTS))
        return _json(merge.merged_receipts([json.loads(answer.body) for answer in answers], limit))

    async def _receipt(self, request: web.Request) -> web.Response:
        answers = tuple((await self._group.ask_all("GET", _target(request))).values())
        found = merge.newest_receipt(json.loads(answer.body) for answer in answers if answer.ok)
        return _passed(_any(answers)) if found is None else _json(found)

    async def _from_one(self, request: web.Request) -> web.Response:
        return _passed(
            await self._group.ask_one(request.method, _target(request), await request.read(), _kept(request))
        )

    # --- changes -----------------------------------------------------------------------------------------------------

    async def _add_worker(self, request: web.Request) -> web.Response:
        worker = _worker_in(await request.read())
        if worker is None:  # whatever is wrong with it, a process says it in full
            return await self._from_one(request)
        try:
            refuse_bound_events(worker)
        except ValueError as problem:
            return problem_response(400, str(problem))
        return await self._change(request, lambda _: self._group.standing.add_worker(worker))

    async def _remove_worker(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]

        def stands(_: Answer) -> None:
            self._group.standing.remove_worker(name)
            self._group.pages.forget_worker(name)

        return await self._change(request, stands)

    async def _order_worker(self, request: web.Request) -> web.Response:
        standing, name = self._group.standing, request.match_info["name"]
        order = {"drain": standing.drain, "resume": standing.resume}[request.match_info["order"]]
        return await self._change(request, lambda _: order(name))

    async def _set_policy(self, request: web.Request) -> web.Response:
        body = await request.read()

        def stands(_: Answer) -> None:
            wanted = msgspec.json.decode(body, type=Policy)
            self._group.standing.switch_policy(wanted.policy, wanted.scorer)

        return await self._change(request, stands)

    async def _close_session(self, request: web.Request) -> web.Response:
        """A process that does not know the session refuses, which is no reason to leave it open in another."""
        answers = tuple((await self._group.ask_all("DELETE", _target(request))).values())
        return _passed(_any([answer for answer in answers if answer.ok] or answers))

    async def _rotate(self, request: web.Request) -> web.Response:
        def stands(answer: Answer) -> None:
            self._group.rotated(msgspec.json.decode(answer.body, type=EpochState))

        return await self._change(request, stands)

    async def _other(self, request: web.Request) -> web.Response:
        if request.path in (CONFIG_PATH, TASKS_PATH):  # between the group and its processes; no such path for others
            return problem_response(404, f"no such path: `{request.path}`")
        if request.method in ("GET", "HEAD"):
            return await self._from_one(request)
        return await self._change(request, lambda _: None)

    async def _change(self, request: web.Request, stands: Callable[[Answer], None]) -> web.Response:
        """`stands` notes the change for processes that begin later; called if it was made."""
        answer = await self._group.change(
            request.method, _target(request), await request.read(), stands, _kept(request)
        )
        return _passed(answer)


def _worker_in(body: bytes) -> WorkerConfig | None:
    """None: no worker that a process would take."""
    try:
        members = msgspec.json.decode(body, type=dict[str, Any])
        return WorkerConfig.model_validate(members) if WORKER_MEMBERS.issuperset(members) else None
    except (*UNREADABLE, ValidationError):
        return None


def _target(request: web.Request) -> str:
    return request.raw_path


def _kept(request: web.Request) -> dict[str, str]:
    return {name: request.headers[name] for name in _PASSED_ON if name in request.headers}


def _any(answers: Sequence[Answer]) -> Answer:
    if not answers:
        raise NoAnswer("all of them are starting or gone")
    return answers[0]


def _passed(answer: Answer) -> web.Response:
    headers = {"Content-Type": answer.content_type} if answer.content_type else None
    return web.Response(body=answer.body, status=answer.status, headers=headers)


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
