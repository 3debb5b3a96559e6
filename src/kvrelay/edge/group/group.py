"""Several gateway processes on one port, and the process that looks after them.

    group process   admin port, receipt file, lines to all processes; no request ever passes through it
    processes       a whole gateway each; the kernel spreads connections over them (SO_REUSEPORT)

A process that dies is started again, after a while that doubles with every death in quick succession. The requests
that it had are lost with it. If the group's process dies, the others drain and end.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import random
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aiohttp import web
from prometheus_client.metrics_core import Metric

from kvrelay.core.receipts.tasks import TaskLedger
from kvrelay.core.routing.epochs import EpochState
from kvrelay.edge.gateway.admin import CONFIG_PATH, TASKS_PATH
from kvrelay.edge.gateway.epochs_file import read_epochs, write_epochs
from kvrelay.edge.gateway.gateway import admin_token, authority
from kvrelay.edge.group.admin import GroupAdmin
from kvrelay.edge.group.frames import Kind, decode_failed, decode_number
from kvrelay.edge.group.hub import Hub
from kvrelay.edge.group.member import CHANGE_TIMEOUT_S, Answer, Member, NoAnswer
from kvrelay.edge.group.merge_metrics import GroupPages
from kvrelay.edge.group.orders import Orders, Standing
from kvrelay.edge.group.safety import refuse_unusable
from kvrelay.edge.observe.gauges import counter, gauge
from kvrelay.edge.observe.receipt_log import LineWriter, receipt_file
from kvrelay.edge.observe.task_counts import MAX_OPEN_TASKS, TaskCounts
from kvrelay.edge.system.clock import monotonic_s
from kvrelay.edge.system.config import Config
from kvrelay.edge.system.config_change import first_state, takes_effect

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.2, 10.0
QUIET_S = 30.0  # a process that lived that long has no bad past
SETTLE_S = 5.0
PAGES_INTERVAL_S = 2.0
LAST_WORDS_S = 10.0  # beyond the grace: for receipts and answers that are on their way out

log = logging.getLogger(__name__)


class Group:
    """Valid between `start()` and `stop()`; to those who serve it looks like one gateway."""

    def __init__(self, config: Config, *, seed: int | None = None) -> None:
        self.config = config
        self.config_state = first_state()
        self.seed = secrets.randbits(63) if seed is None else seed
        self.standing = Standing(config)
        self.pages = GroupPages()
        self._tasks_seen = TaskCounts(TaskLedger(idle_s=config.observe.task_idle_s, max_open=MAX_OPEN_TASKS))
        self._key_seed = secrets.token_bytes(32)
        self._fingerprint_secret = secrets.token_bytes(32)
        self._members = tuple(Member(number) for number in range(config.gateway.processes))
        self._folder: Path | None = None
        self._port_holder: socket.socket | None = None
        self._receipts: LineWriter | None = None
        self._hub = Hub(self._on_word)
        self._admin: web.AppRunner | None = None
        self._admin_api: GroupAdmin
        self._changing = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._ending = False
        self._started_at = 0.0

    # --- life --------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Raises what `Gateway.start` raises and leaves nothing open."""
        self._started_at = time.monotonic()
        refuse_unusable(self.config)
        if self.config.gateway.epochs_file is not None:
            self.standing.epochs = read_epochs(self.config.gateway.epochs_file)
        try:
            await self._open()
            await self._start_members()
        except BaseException:
            for member in self._members:
                member.kill()  # nobody was told that it is there
            await self.stop()
            raise
        self._tasks += [asyncio.create_task(self._look_after(member)) for member in self._members]
        self._tasks.append(asyncio.create_task(self._read_pages_regularly()))

    async def drain(self) -> int:
        """As `Gateway.drain`, in all processes; they have ended afterwards."""
        self._ending = True
        self._hub.say(Kind.DRAIN)
        return await self._until_all_ended(self.config.gateway.drain.grace_s + LAST_WORDS_S)

    async def cut_short(self) -> int:
        """Ends all open requests and processes now; answers how many requests were cut."""
        self._ending = True
        self._hub.say(Kind.CUT)
        return await self._until_all_ended(LAST_WORDS_S)

    async def stop(self) -> None:
        """Ends everything. May be called again."""
        self._ending = True
        if self._folder is None:
            return
        if any(member.running for member in self._members):
            await self.cut_short()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._admin is not None:
            await self._admin.cleanup()
            self._admin = None
        await self._hub.close(LAST_WORDS_S)
        for member in self._members:
            await member.close()
        if self._receipts is not None:
            self._receipts.close()
        if self._port_holder is not None:
            self._port_holder.close()
        folder, self._folder = self._folder, None
        shutil.rmtree(folder, ignore_errors=True)

    # --- what it says of itself --------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        scheme = "https" if self.config.gateway.tls_cert is not None else "http"
        return f"{scheme}://{authority(self.config.gateway.host)}:{self._port}"

    @property
    def admin_url(self) -> str:
        assert self._admin is not None
        return f"http://{authority(self.config.gateway.admin_host)}:{self._admin.addresses[0][1]}"

    @property
    def _port(self) -> int:
        assert self._port_holder is not None
        return int(self._port_holder.getsockname()[1])

    def describe(self) -> dict[str, Any]:
        """What /admin/status says of the gateway as a whole."""
        return {
            "pid": os.getpid(),
            "url": self.url,
            "uptime_s": round(time.monotonic() - self._started_at, 1),
            "receipts_dropped_by_group": self._hub.receipts_dropped,
        }

    def describe_processes(self, answers: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """`answers` has what those said that answered."""
        return [
            {
                "process": member.number,
                "pid": member.pid,
                "ready": member.ready,
                "answers": member.number in answers,
                "restarts": member.restarts,
                **{
                    name: answers.get(member.number, {}).get(name)
                    for name in ("uptime_s", "draining", "open_requests", "client_connections")
                },
            }
            for member in self._members
        ]

    def _facts(self) -> Iterator[Metric]:
        yield gauge("kvrelay_process_up", [((str(member.number),), member.ready) for member in self._members])
        yield counter("kvrelay_process_restarts_total", [((), sum(member.restarts for member in self._members))])
        yield from self._tasks_seen.families(monotonic_s() * 1e3)

    # --- questions and changes ---------------------------------------------------------------------------------------

    async def ask_one(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Any process that answers. Raises NoAnswer."""
        problem = NoAnswer("all of them are starting or gone")
        for member in self._ready():
            try:
                return await member.ask(method, path, body, headers)
            except NoAnswer as silence:
                problem = silence
        raise problem

    async def ask_all(self, method: str, path: str) -> dict[int, Answer]:
        """Of those that answer, by process."""
        members = self._ready()
        answers = await asyncio.gather(*(member.ask(method, path) for member in members), return_exceptions=True)
        return {
            member.number: answer for member, answer in zip(members, answers, strict=True) if isinstance(answer, Answer)
        }

    async def change(
        self,
        method: str,
        path: str,
        body: bytes,
        stands: Callable[[Answer], None],
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """In all processes or in none, see `admin.py`. Raises NoAnswer when no process is there to ask."""
        async with self._changing:
            for member in self._ready():
                try:
                    first = await member.ask(method, path, body, headers, within_s=CHANGE_TIMEOUT_S)
                except NoAnswer as silence:
                    self._end_process(member, str(silence))
                    continue
                if first.ok:
                    stands(first)
                    others = [other for other in self._ready() if other is not member]
                    await asyncio.gather(*(self._follow(other, method, path, body, headers) for other in others))
                return first
        raise NoAnswer("all of them are starting or gone")

    async def _follow(
        self, member: Member, method: str, path: str, body: bytes, headers: Mapping[str, str] | None
    ) -> None:
        try:
            answer = await member.ask(method, path, body, headers, within_s=CHANGE_TIMEOUT_S)
        except NoAnswer as silence:
            self._end_process(member, str(silence))
            return
        if not answer.ok:
            self._end_process(member, f"{method} {path} was answered {answer.status}, unlike by the others")

    def rotated(self, epochs: EpochState) -> None:
        """All processes rotate, and whichever begins later begins there."""
        self.standing.epochs = epochs
        file = self.config.gateway.epochs_file
        if file is not None:
            try:
                write_epochs(file, epochs)
            except OSError as problem:
                log.error("epochs_not_kept: %s", problem)

    def _end_process(self, member: Member, why: str) -> None:
        log.error("process_out_of_step process=%d pid=%s: %s; it is started again", member.number, member.pid, why)
        member.kill()

    def _ready(self) -> list[Member]:
        return [member for member in self._members if member.ready]

    async def reload(self, wanted: Config) -> tuple[str, ...]:
        """As `Gateway.reload`, in all processes or in none."""
        config, needs_restart = takes_effect(self.config, wanted)
        refuse_unusable(config)
        self.standing.workers_under(config)
        token = admin_token(config.gateway.admin_token_file)

        def stands(_: Answer) -> None:
            self.standing.take(config)
            self.config = config
            self._admin_api.token = token

        try:
            answer = await self.change("PUT", CONFIG_PATH, config.model_dump_json().encode(), stands)
        except NoAnswer as problem:
            raise ValueError(str(problem)) from problem
        if not answer.ok:
            raise ValueError(answer.body.decode(errors="replace"))
        self.config_state.taken(needs_restart)
        return needs_restart

    # --- figures -----------------------------------------------------------------------------------------------------

    async def read_pages(self) -> None:
        """The processes' present figures."""
        answers = await self.ask_all("GET", "/metrics")
        for member in self._members:
            answer = answers.get(member.number)
            if answer is None or not answer.ok:
                self.pages.silent(member.number)
            else:
                self.pages.take(member.number, answer.body.decode())
        for answer in (await self.ask_all("POST", TASKS_PATH)).values():
            if answer.ok:
                self._tasks_seen.take(answer.body)

    async def _read_pages_regularly(self) -> None:
        """So that little of what a process counted is lost with it."""
        while True:
            await asyncio.sleep(PAGES_INTERVAL_S)
            await self.read_pages()

    # --- processes ---------------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        gateway = self.config.gateway
        self._folder = Path(tempfile.mkdtemp(prefix="kvrelay-"))  # for our user only
        receipts = self.config.receipts
        if receipts.path is not None:
            self._receipts = receipt_file(receipts.path, rotate_mb=receipts.rotate_mb, keep=receipts.keep)
        self._hub.receipts = self._receipts
        await self._hub.listen(self._folder / "hub")
        self._port_holder = held_port(gateway.host, gateway.port)
        self.pages.bind(self._facts)
        self._admin_api = GroupAdmin(self, admin_token(gateway.admin_token_file))
        app = self._admin_api.app(gateway.limits.body_bytes)
        self._admin = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._admin.setup()
        await web.TCPSite(self._admin, gateway.admin_host, gateway.admin_port).start()

    async def _start_members(self) -> None:
        began = await asyncio.gather(*(member.start(self._orders(member, settle_s=0.0)) for member in self._members))
        if all(began):
            return
        failures = [member.failure for member in self._members if member.failure is not None]
        if failures:
            raise failures[0].raised()
        raise ValueError("a gateway process ended before it was ready; its log stands above")

    async def _look_after(self, member: Member) -> None:
        """Until the group ends."""
        deaths = 0
        while not self._ending:
            status = await member.ended()
            self.pages.died(member.number)
            if self._ending:
                return
            deaths = 1 if member.age_s > QUIET_S else deaths + 1
            wait_s = min(FIRST_BACKOFF_S * 2 ** (deaths - 1), LONGEST_BACKOFF_S) * random.uniform(0.8, 1.2)
            what = "ended as it was told" if status == 0 else f"died with status {status}, its open requests are lost"
            log.error("process_gone process=%d pid=%s: %s; back in %.1f s", member.number, member.pid, what, wait_s)
            await asyncio.sleep(wait_s)
            member.restarts += 1
            if not self._ending and await self._start_again(member):
                log.info("process_started process=%d pid=%s", member.number, member.pid)

    async def _start_again(self, member: Member) -> bool:
        try:
            async with self._changing:  # a change that is made meanwhile is not missed
                return await member.start(self._orders(member, settle_s=SETTLE_S))
        except OSError as problem:  # of this machine: too many processes, no memory
            log.error("process_not_started process=%d: %s", member.number, problem)
            return False

    def _orders(self, member: Member, *, settle_s: float) -> Orders:
        assert self._folder is not None
        standing = self.standing
        return Orders(
            process=member.number,
            port=self._port,
            hub_socket=str(self._folder / "hub"),
            admin_socket=str(self._folder / f"admin-{member.number}"),
            config=standing.config.model_dump(mode="json"),
            workers=[worker.model_dump(mode="json") for worker in standing.workers.values()],
            policy=standing.policy,
            scorer=standing.scorer,
            drained=list(standing.drained),
            epochs=standing.epochs,
            seed=self.seed,
            key_seed=self._key_seed,
            fingerprint_secret=self._fingerprint_secret,
            settle_s=settle_s,
        )

    def _on_word(self, process: int, kind: Kind, payload: bytes) -> None:
        member = self._members[process]
        if kind is Kind.READY:
            member.is_ready()
        elif kind is Kind.FAILED:
            member.has_failed(decode_failed(payload))
        elif kind is Kind.ENDED:
            member.cut = decode_number(payload)

    async def _until_all_ended(self, within_s: float) -> int:
        running = [member for member in self._members if member.running]
        ends = asyncio.gather(*(member.ended() for member in running))
        try:
            async with asyncio.timeout(within_s):
                await ends
        except TimeoutError:
            for member in running:
                member.kill()
            await asyncio.gather(*(member.ended() for member in running))
        await self._hub.all_hung_up(LAST_WORDS_S)  # the last word may come after the end
        return sum(member.cut for member in self._members)


def held_port(host: str, port: int) -> socket.socket:
    """A socket that keeps the port for processes that will listen there; it does not listen itself.

    Raises OSError when anybody listens there already. Without that look, a second gateway of the same user would join
    the first one on its port, since that is what sharing a port means.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    holder = socket.socket(family, socket.SOCK_STREAM)
    try:
        with socket.socket(family, socket.SOCK_STREAM) as looking:
            looking.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            looking.bind(address)
            address = looking.getsockname()
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(address)
    except OSError as problem:
        holder.close()
        if problem.errno == errno.EADDRINUSE:
            text = f"error while attempting to bind on address {address[:2]!r}: address already in use"
            raise OSError(problem.errno, text) from problem
        raise
    return holder
