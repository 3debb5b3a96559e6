"""A fleet that somebody else started, real engines included: read from a file, confirmed by target, put back after.

The drill brings its own gateway and its own proxies before the workers, so that nothing but the workers themselves is
touched; and those only if the file says that they are staging, has a command to start each again (the rollback), and
each target's PID or UID was confirmed by hand. What the right answers are is asked before anything is broken.

The file is described in `staging_file.py`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp
import msgspec

from kvrelay.core.receipts.receipt import Receipt
from kvrelay.edge.chaos.events import EventProxy
from kvrelay.edge.chaos.tcp import TcpProxy
from kvrelay.lab.drills import actions as act
from kvrelay.lab.drills.drill import Drill, Send, Settle, Setup, StorePlan, Turn, WorkerPlan
from kvrelay.lab.drills.fleets.base import CannotDo
from kvrelay.lab.drills.fleets.casting import Cast, cast
from kvrelay.lab.drills.fleets.client import Seen
from kvrelay.lab.drills.fleets.mock import MockProcessFleet
from kvrelay.lab.drills.fleets.our_gateway import OurGateway
from kvrelay.lab.drills.fleets.processes import Process, Processes
from kvrelay.lab.drills.fleets.shared_store import SharedStore
from kvrelay.lab.drills.fleets.staging_file import AttachedWorker, FleetFile, is_alive
from kvrelay.lab.drills.history import Outcome, Settled
from kvrelay.lab.drills.prompts import Text, text

UP_WITHIN_S = 600.0
GONE_WITHIN_S = 30.0
POLL_S = 0.5
SETTLE_WITHIN_S = 120.0
BASELINE_SALT = "kvrelay-drill-baseline"
SHARES_WITHIN_S = 60.0
WARM_UP_SEED, WARM_UP_TOKENS = 990_000, 700


class AttachedProcess:
    """As `RunningWorker`, of a process that is not our child. It outlives the drills of one command, because each may
    leave another PID behind than the one that was confirmed: what was started again is ours to end."""

    def __init__(self, worker: AttachedWorker) -> None:
        self.worker = worker
        self.url = worker.url
        self.pid = worker.pid
        self.incarnation = ""  # what the gateway calls it; asked when it is needed

    @property
    def alive(self) -> bool:
        return self.pid is not None and is_alive(self.pid)

    def signal(self, number: signal.Signals) -> None:
        """To its whole process group, as an engine has children of its own."""
        if self.pid is None:
            raise CannotDo(f"{self.url} has no PID here, so it cannot be signalled")
        try:
            os.killpg(os.getpgid(self.pid), number)
        except ProcessLookupError:
            pass  # it is gone


def attached_processes(fleet: FleetFile) -> tuple[AttachedProcess, ...]:
    """For all drills on this fleet."""
    return tuple(AttachedProcess(worker) for worker in fleet.workers)


def _start(command: str) -> int:
    """The PID of the leader of a new process group."""
    null = subprocess.DEVNULL
    return subprocess.Popen(shlex.split(command), stdin=null, stdout=null, stderr=null, start_new_session=True).pid


class AttachedProcesses(Processes):
    """Puts proxies before workers that are there already, and starts those again that a drill ended."""

    def __init__(self, setup: Setup, attached: Sequence[AttachedProcess], cast: Cast) -> None:
        super().__init__(setup)
        self._attached = attached
        self._cast = cast

    async def add(self, plans: Iterable[WorkerPlan]) -> None:
        for plan in plans:
            running = self._attached[self._cast.entries[plan.name]]
            worker = running.worker
            parts = urlsplit(worker.url)
            network = TcpProxy(parts.hostname or "", parts.port or 80)
            await network.__aenter__()
            events = EventProxy(worker.events, replay=worker.replay or None)
            await asyncio.to_thread(events.start)
            await asyncio.to_thread(events.wait_until_connected, 10.0)
            process = Process(running, network, events, plan)  # type: ignore[arg-type]
            process.adapter, process.kv_report = worker.adapter, worker.kv_report
            self.by_name[plan.name] = process

    async def stop(self) -> None:
        """Everything is put back: stopped ones go on, ended ones are started."""
        for name, process in self.by_name.items():
            if process.frozen:
                process.running.signal(signal.SIGCONT)
            if not process.running.alive:
                await self.restart(name)
            await process.network.__aexit__(None, None, None)
            await asyncio.to_thread(process.events.stop)

    async def restart(self, name: str) -> None:
        running: Any = self.by_name[name].running
        if running.alive:
            running.signal(signal.SIGKILL)
            await self._until_gone(running)
        assert running.worker.start is not None
        running.pid = await asyncio.to_thread(_start, running.worker.start)
        await self._until_up(running.url)

    async def _until_gone(self, running: AttachedProcess) -> None:
        for _ in range(round(GONE_WITHIN_S / POLL_S)):
            if not running.alive:
                return
            await asyncio.sleep(POLL_S)

    async def _until_up(self, url: str) -> None:
        deadline_s = time.monotonic() + UP_WITHIN_S
        async with aiohttp.ClientSession() as http:
            while time.monotonic() < deadline_s:
                try:
                    async with http.get(f"{url}/health") as response:
                        if response.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(POLL_S)
        raise CannotDo(f"{url} did not come up again within {UP_WITHIN_S:.0f} s")


_Question = tuple[Text, int, str | None]


def _question_of(turn: Turn) -> _Question:
    return turn.text, turn.max_tokens, turn.adapter


class AttachedFleet(MockProcessFleet):
    """The same drill on real engines. What a worker holds is asked by a request of one token, straight to it; what the
    right answer is, by the same prompt in a cache namespace of its own, before the drill sends it."""

    kind = "attached"

    def __init__(
        self, drill: Drill, fleet: FleetFile, attached: Sequence[AttachedProcess], *, folder: Path | None = None
    ) -> None:
        self._cast = cast(drill, [worker.revision for worker in fleet.workers])
        there = tuple(plan for plan in drill.setup.workers if plan.name in self._cast.entries)
        setup = msgspec.structs.replace(drill.setup, workers=there, first_byte_s=60.0, idle_s=30.0)
        super().__init__(
            msgspec.structs.replace(drill, setup=setup), front=OurGateway(model=fleet.model), folder=folder
        )
        self._processes = AttachedProcesses(setup, attached, self._cast)
        self._fleet = fleet
        self._steps = drill.steps
        self.model = fleet.model
        notes = self.history.notes
        self.history.block_size_tokens = fleet.block_size
        notes["targets"] = {name: fleet.workers[number].identity for name, number in sorted(self._cast.entries.items())}
        notes["namespace"] = fleet.namespace
        if self._cast.left_out:
            notes["left_out"] = list(self._cast.left_out)
        self._baselines: dict[_Question, dict[str, str]] = {}

    # --- the shared tier ---------------------------------------------------------------------------------------------

    def _shared_store(self, plan: StorePlan, folder: Path) -> SharedStore:
        given = self._fleet.store
        if given is None:
            raise CannotDo("the fleet file has no [store], so nobody knows where its workers look for one")
        if given.failure_policy != plan.failure_policy:
            raise CannotDo(f"the workers were started with `{given.failure_policy}`, the drill is about another policy")
        return SharedStore(plan, folder, listen=given.address)

    async def __aenter__(self) -> Self:
        self._cast.must_be_enough()
        await super().__aenter__()
        try:
            for step in self._steps:
                await self._ask_baselines(step.turns if isinstance(step, Send) else ())
            if self._processes.store is not None:
                await self._until_all_share(self._processes.store)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def _until_all_share(self, store: SharedStore) -> None:
        """A store that was not there is found again by and by, and nothing must be left of what was computed before."""
        for name, process in self._processes.by_name.items():
            deadline_s, number = time.monotonic() + SHARES_WITHIN_S, 0
            before = store.content.figures()["objects"]
            while store.content.figures()["objects"] == before:
                if time.monotonic() > deadline_s:
                    raise CannotDo(f"{name} stores nothing at {store.network.address}")
                number += 1
                await self._directly(process, text(WARM_UP_SEED + number, WARM_UP_TOKENS), 1, secrets.token_hex(8))
                await asyncio.sleep(POLL_S)
            await self._forget(name, process)
        store.content.wipe()
        store.content.begin_counting()

    async def _forget(self, name: str, process: Process) -> None:
        path = "/reset_prefix_cache?reset_external=true"
        async with self._http.post(process.running.url + path) as response:
            if response.status != 200 or not (await response.json()).get("success"):
                raise CannotDo(f"{name} kept its cache: {path} was answered {response.status}")

    # --- requests ----------------------------------------------------------------------------------------------------

    async def send(self, number: int, step: Send) -> None:
        await self._ask_baselines(step.turns)  # those who have joined since the start
        await super().send(number, step)

    async def _ask_baselines(self, turns: Iterable[Turn]) -> None:
        """Of every revision that is there, before anything is broken."""
        for turn in turns:
            known = self._baselines.setdefault(_question_of(turn), {})
            for process in self._processes.by_name.values():
                if process.plan.revision not in known and process.running.alive and not process.frozen:
                    said = await self._directly(process, turn.text, turn.max_tokens, BASELINE_SALT, turn.adapter)
                    known |= {} if said is None else {process.plan.revision: said[0]}

    def _outcome(self, number: int, begins_s: float, turn: Turn, seen: Seen, receipts: list[Receipt] | None) -> Outcome:
        """Where a KV connector reports, its figure: the engine's own is the plan, also when nothing of it came."""
        outcome = super()._outcome(number, begins_s, turn, seen, receipts)
        if outcome.receipt is not None and outcome.receipt.remote_outcome is not None:
            outcome.cached_tokens = outcome.receipt.actual_cached_tokens
        return outcome

    async def _directly(
        self, process: Process, text: Text, max_tokens: int, salt: str | None, adapter: str | None = None
    ) -> tuple[str, int] | None:
        """The answer's text, and how many tokens of the prompt were cached; None for an error."""
        body = {
            "model": adapter or self.model,
            "prompt": text.token_ids().tolist(),
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        body |= {"ignore_eos": True} | ({} if salt is None else {"cache_salt": salt})
        async with self._http.post(f"{process.running.url}/v1/completions", json=body) as response:
            if response.status != 200:
                return None
            answer = await response.json()
        details = answer["usage"].get("prompt_tokens_details") or {}
        return answer["choices"][0]["text"], details.get("cached_tokens") or 0

    def _right_texts(self, turn: Turn, receipt: Receipt | None) -> dict[str, str]:
        return self._baselines[_question_of(turn)]

    async def _real(self, process: Process, text: Text, salt: str | None) -> int | None:
        if not process.running.alive or process.frozen:
            return None
        said = await self._directly(process, text, 1, salt)
        return None if said is None else said[1]

    async def do(self, action: act.Action) -> None:
        """A worker that is struck is known by the life that it then had."""
        played = self._cast.plays(action)
        if played is None:
            return
        for worker in (await self._front.view("", 0.0)).workers:
            process = self._processes.by_name.get(worker.name)
            if process is not None and process.running.alive and worker.life is not None:
                process.running.incarnation = worker.life  # type: ignore[misc]
        await super().do(played)

    async def settle(self, step: Settle) -> None:
        """Until all are used, and those that were ended in another life than the one they had."""
        ended = {deed.worker: deed.life for deed in self.history.deeds if deed.kind in ("Kill", "Terminate")}
        wanted = step.workers or tuple(self._processes.by_name)
        began_s = self.now_s
        while self.now_s < began_s + SETTLE_WITHIN_S:
            seen = {worker.name: worker for worker in (await self._front.view("", 0.0)).workers if worker.routable}
            if all(name in seen and seen[name].life != ended.get(name) for name in wanted):
                self.history.settled.append(Settled(self.now_s - began_s, wanted))
                return
            await asyncio.sleep(POLL_S)
        self.history.settled.append(Settled(None, wanted))
