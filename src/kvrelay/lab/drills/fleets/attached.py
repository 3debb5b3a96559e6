"""A fleet that somebody else started, real engines included: read from a file, confirmed by target, put back after.

The drill brings its own gateway and its own proxies before the workers, so that nothing but the workers themselves is
touched; and those only if the file says that they are staging, has a command to start each again (the rollback), and
each target's PID or UID was confirmed by hand. What the right answers are is asked before anything is broken.

    staging = true
    namespace = "staging-a"          # shown in the evidence
    model = "tiny"

    [[workers]]
    url = "http://127.0.0.1:8100"
    pid = 4711                        # leader of its process group; or uid = "..." for one that cannot be signalled
    start = "bash start-a.sh"         # starts it again at the same address; its output is nobody's
    events = "ipc:///tmp/events-a"
    replay = "ipc:///tmp/replay-a"
    adapter = "vllm"
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
from msgspec import Struct

from kvrelay.core.receipts.receipt import Receipt
from kvrelay.edge.chaos.events import EventProxy
from kvrelay.edge.chaos.tcp import TcpProxy
from kvrelay.lab.drills import actions as act
from kvrelay.lab.drills.drill import Drill, Send, Settle, Setup, Turn, WorkerPlan
from kvrelay.lab.drills.fleets.base import CannotDo
from kvrelay.lab.drills.fleets.mock import MockProcessFleet
from kvrelay.lab.drills.fleets.our_gateway import OurGateway
from kvrelay.lab.drills.fleets.processes import Process, Processes
from kvrelay.lab.drills.history import Settled
from kvrelay.lab.drills.prompts import Text

UP_WITHIN_S = 600.0
GONE_WITHIN_S = 30.0
POLL_S = 0.5
SETTLE_WITHIN_S = 120.0
BASELINE_SALT = "kvrelay-drill-baseline"


class UnusableFleet(ValueError):
    """The file cannot be used; the message says why and what would be legal."""


class Unconfirmed(Exception):
    """Nobody confirmed that these may be broken."""

    def __init__(self, targets: list[str]) -> None:
        super().__init__(", ".join(targets))
        self.targets = targets


class AttachedWorker(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: str
    pid: int | None = None
    uid: str | None = None
    start: str | None = None
    events: str = ""
    replay: str = ""
    adapter: str = "vllm"

    @property
    def identity(self) -> str:
        return str(self.pid if self.pid is not None else self.uid)


class FleetFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    workers: tuple[AttachedWorker, ...]
    model: str
    staging: bool = False
    namespace: str = ""
    block_size: int = 16


def read_fleet(path: Path, confirmed: Sequence[str]) -> FleetFile:
    """Raises UnusableFleet, or Unconfirmed with the targets as they have to be confirmed: w0=PID."""
    try:
        fleet = msgspec.toml.decode(path.read_bytes(), type=FleetFile)
    except (OSError, msgspec.DecodeError) as problem:
        raise UnusableFleet(str(problem)) from problem
    if not fleet.staging:
        raise UnusableFleet("it does not say `staging = true`; drills break things, and never in production")
    for number, worker in enumerate(fleet.workers):
        if (worker.pid is None) == (worker.uid is None):
            raise UnusableFleet(f"worker {number} ({worker.url}) needs either `pid` or `uid`")
        if worker.pid is not None and not worker.start:
            raise UnusableFleet(f"worker {number} ({worker.url}) has no `start`: there would be no way back")
        if worker.pid is not None and not _alive(worker.pid):
            raise UnusableFleet(f"worker {number} ({worker.url}): no process {worker.pid} is running")
    wanted = [f"w{number}={worker.identity}" for number, worker in enumerate(fleet.workers)]
    missing = [target for target in wanted if target not in confirmed]
    if missing:
        raise Unconfirmed(missing)
    return fleet


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()  # ended, and nobody has asked how
    except OSError:
        return True


class _Running:
    """As `RunningWorker`, of a process that is not our child."""

    def __init__(self, worker: AttachedWorker) -> None:
        self.worker = worker
        self.url = worker.url
        self.pid = worker.pid
        self.incarnation = ""  # what the gateway calls it; asked when it is needed

    @property
    def alive(self) -> bool:
        return self.pid is not None and _alive(self.pid)

    def signal(self, number: signal.Signals) -> None:
        """To its whole process group, as an engine has children of its own."""
        if self.pid is None:
            raise CannotDo(f"{self.url} has no PID here, so it cannot be signalled")
        try:
            os.killpg(os.getpgid(self.pid), number)
        except ProcessLookupError:
            pass  # it is gone


def _start(command: str) -> int:
    """The PID of the leader of a new process group."""
    null = subprocess.DEVNULL
    return subprocess.Popen(shlex.split(command), stdin=null, stdout=null, stderr=null, start_new_session=True).pid


class AttachedProcesses(Processes):
    """Puts proxies before workers that are there already, and starts those again that a drill ended."""

    def __init__(self, setup: Setup, fleet: FleetFile) -> None:
        super().__init__(setup)
        self._fleet = fleet

    async def add(self, plans: Iterable[WorkerPlan]) -> None:
        for plan in plans:
            number = len(self.by_name)
            if number >= len(self._fleet.workers):
                raise CannotDo(f"the drill wants one more worker, `{plan.name}`, than the fleet has")
            worker = self._fleet.workers[number]
            parts = urlsplit(worker.url)
            network = TcpProxy(parts.hostname or "", parts.port or 80)
            await network.__aenter__()
            events = EventProxy(worker.events, replay=worker.replay or None)
            await asyncio.to_thread(events.start)
            await asyncio.to_thread(events.wait_until_connected, 10.0)
            process = Process(_Running(worker), network, events, plan)  # type: ignore[arg-type]
            process.adapter = worker.adapter
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

    async def _until_gone(self, running: _Running) -> None:
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


class AttachedFleet(MockProcessFleet):
    """The same drill on real engines. What a worker holds is asked by a request of one token, straight to it; what the
    right answer is, by the same prompt in a cache namespace of its own, before the drill sends it."""

    kind = "attached"

    def __init__(self, drill: Drill, fleet: FleetFile, *, folder: Path | None = None) -> None:
        few = drill.setup.workers[: len(fleet.workers)]
        setup = msgspec.structs.replace(drill.setup, workers=few, first_byte_s=60.0, idle_s=30.0)
        super().__init__(
            msgspec.structs.replace(drill, setup=setup), front=OurGateway(model=fleet.model), folder=folder
        )
        self._processes = AttachedProcesses(setup, fleet)
        self.model = fleet.model
        self.history.block_size_tokens = fleet.block_size
        self.history.notes["targets"] = {f"w{n}": worker.identity for n, worker in enumerate(fleet.workers)}
        self.history.notes["namespace"] = fleet.namespace
        self._baselines: dict[tuple[Text, int], str] = {}

    async def send(self, number: int, step: Send) -> None:
        for turn in step.turns:
            if (turn.text, turn.max_tokens) not in self._baselines:
                self._baselines[turn.text, turn.max_tokens] = await self._baseline(turn)
        await super().send(number, step)

    async def _baseline(self, turn: Turn) -> str:
        process = next(process for process in self._processes.by_name.values() if process.running.alive)
        return (await self._directly(process, turn.text, turn.max_tokens, BASELINE_SALT))[0]

    async def _directly(self, process: Process, text: Text, max_tokens: int, salt: str | None) -> tuple[str, int]:
        """The answer's text, and how many tokens of the prompt were cached."""
        body = {"model": self.model, "prompt": text.token_ids().tolist(), "max_tokens": max_tokens, "temperature": 0}
        body |= {"ignore_eos": True} | ({} if salt is None else {"cache_salt": salt})
        async with self._http.post(f"{process.running.url}/v1/completions", json=body) as response:
            answer = await response.json()
        details = answer["usage"].get("prompt_tokens_details") or {}
        return answer["choices"][0]["text"], details.get("cached_tokens") or 0

    def _right_texts(self, turn: Turn, receipt: Receipt | None) -> dict[str, str]:
        return {"": self._baselines[turn.text, turn.max_tokens]}

    async def _real(self, process: Process, text: Text, salt: str | None) -> int | None:
        if not process.running.alive or process.frozen:
            return None
        return (await self._directly(process, text, 1, salt))[1]

    async def do(self, action: act.Action) -> None:
        """A worker that is struck is known by the life that it then had."""
        for worker in (await self._front.view("", 0.0)).workers:
            process = self._processes.by_name.get(worker.name)
            if process is not None and process.running.alive and worker.life is not None:
                process.running.incarnation = worker.life  # type: ignore[misc]
        await super().do(action)

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
