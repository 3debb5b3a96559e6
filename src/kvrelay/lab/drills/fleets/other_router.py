"""A router of another make before mock workers: any command that listens on a port and speaks the OpenAI API.

It can be started, stopped, killed and paused like ours. It has no admin port that we know, so what it believes is not
observed, and what only ours can be told cannot be done.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
from collections.abc import Mapping
from pathlib import Path

import aiohttp

from kvrelay.core.receipts.receipt import Receipt
from kvrelay.lab.drills import actions as act
from kvrelay.lab.drills.drill import Setup
from kvrelay.lab.drills.fleets.base import CannotDo
from kvrelay.lab.drills.fleets.processes import Process, Processes
from kvrelay.lab.drills.history import View
from kvrelay.lab.drills.prompts import Text

READY_WITHIN_S = 60.0
STOP_WITHIN_S = 5.0
POLL_S = 0.1


class OtherRouter:
    """`command` is run without a shell; `{port}` and `{workers}` (their URLs, spaces between) are filled in."""

    def __init__(self, command: str, *, name: str = "another router") -> None:
        self.name = name
        self.takes_token_ids = False  # some refuse anything but text
        self.url = ""
        self._command = command
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, setup: Setup, processes: Processes, folder: Path) -> None:
        self._folder = folder
        self._workers = " ".join(process.url for process in processes.by_name.values())
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        await self._begin()

    async def _begin(self) -> None:
        words = shlex.split(self._command.replace("{port}", str(self._port)).replace("{workers}", self._workers))
        with (self._folder / "router.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *words, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        await self._until_it_serves()

    async def _until_it_serves(self) -> None:
        question = {"model": "mock-model", "prompt": "are you there", "max_tokens": 1}
        async with asyncio.timeout(READY_WITHIN_S), aiohttp.ClientSession() as http:
            while True:
                try:
                    async with http.post(f"{self.url}/v1/completions", json=question) as response:
                        if response.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        if self._process is None:
            return
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_WITHIN_S):
                await self._process.wait()
        except TimeoutError:
            pass
        self._signal(signal.SIGKILL)
        await self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass  # it is gone

    async def restart(self) -> None:
        assert self._process is not None
        self._signal(signal.SIGKILL)
        await self._process.wait()
        await self._begin()

    async def pause(self, seconds: float) -> None:
        self._signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        self._signal(signal.SIGCONT)

    async def do(self, action: act.Action) -> None:
        raise CannotDo(f"{self.name} is not known to be able to `{action}`")

    async def add(self, name: str, process: Process) -> None:
        raise CannotDo(f"{self.name} is not known to take workers while it runs")

    async def remove(self, name: str) -> None:
        raise CannotDo(f"{self.name} is not known to let workers go while it runs")

    async def uses(self, lives: Mapping[str, str]) -> bool | None:
        return None

    async def view(self, label: str, at_s: float) -> View:
        return View(label=label, at_s=at_s)

    async def claims(self, text: Text) -> dict[str, int] | None:
        return None

    async def salt(self) -> str | None:
        return None

    async def receipts(self) -> list[Receipt] | None:
        return None

    async def receipts_dropped(self) -> int | None:
        return None
