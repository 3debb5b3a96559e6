"""Our own gateway as a front: `kvrelay serve` in a process of its own, asked and ordered on its admin port."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import msgspec

from kvrelay.core.receipts.receipt import Receipt
from kvrelay.edge.observe.receipt_file import read_receipts
from kvrelay.lab.arms.gateway_process import GatewayProcess
from kvrelay.lab.drills import actions as act
from kvrelay.lab.drills.drill import INTERVAL_S, Setup
from kvrelay.lab.drills.fleets.admin import AdminPort
from kvrelay.lab.drills.fleets.base import CannotDo
from kvrelay.lab.drills.fleets.processes import Process, Processes, gateway_config
from kvrelay.lab.drills.history import View
from kvrelay.lab.drills.prompts import Text
from kvrelay.lab.drills.reference import MODEL

START_TIMEOUT_S = 30.0
MAX_RECEIPTS = 1000


class _Recent(msgspec.Struct):
    receipts: list[Receipt]


class OurGateway:
    name = "kvrelay"
    takes_token_ids = True

    def __init__(self, *, model: str = MODEL) -> None:
        self._model = model
        self._process: GatewayProcess | None = None
        self._lives = 0

    @property
    def url(self) -> str:
        return self._running.ready.url

    @property
    def _running(self) -> GatewayProcess:
        assert self._process is not None, "the gateway was not started"
        return self._process

    # --- life --------------------------------------------------------------------------------------------------------

    async def start(self, setup: Setup, processes: Processes, folder: Path) -> None:
        self._setup, self._folder = setup, folder
        self._http = aiohttp.ClientSession()
        self._admin = AdminPort(self._http, "")
        for left in ("receipts.jsonl", "epochs.json"):  # by the same drill, into the same folder
            (folder / left).unlink(missing_ok=True)
        config = gateway_config(setup, processes, folder, interval_s=INTERVAL_S)
        (folder / "gateway.toml").write_text(config)
        await self._begin()
        await self._running.wait_for_workers(list(processes.by_name))

    async def _begin(self) -> None:
        self._lives += 1
        log = self._folder / f"gateway-{self._lives}.log"
        process = GatewayProcess(self._folder / "gateway.toml", log=log, ready_timeout_s=START_TIMEOUT_S)
        await process.__aenter__()
        self._process = process
        self._admin.url = process.ready.admin_url

    async def stop(self) -> None:
        if self._process is not None:
            self._process.signal(signal.SIGCONT)
            await self._process.__aexit__(None, None, None)
        await self._http.close()

    async def restart(self) -> None:
        self._running.signal(signal.SIGKILL)
        await self._running.__aexit__(None, None, None)
        await self._begin()

    async def pause(self, seconds: float) -> None:
        self._running.signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        self._running.signal(signal.SIGCONT)

    # --- orders ------------------------------------------------------------------------------------------------------

    async def do(self, action: act.Action) -> None:
        match action:
            case act.SetPolicy():
                await self._admin.call("PUT", "/admin/policy", {"policy": action.policy})
            case act.Rollback():
                await self._roll_back()
            case act.CloseSession():
                await self._admin.call("DELETE", f"/admin/sessions/{action.session}")
            case act.Rotate():
                given = {"trigger": action.trigger.value, "keep": list(action.keep)}
                for name in ("tenant", "adapter"):
                    if getattr(action, name) is not None:
                        given[name] = getattr(action, name)
                await self._admin.call("POST", "/admin/epochs/rotate", given)
            case act.ForgetCaches():
                for worker in (await self._admin.get("/admin/workers"))["workers"]:
                    await self._admin.call("POST", f"/admin/workers/{worker['name']}/reset")
            case _:
                raise CannotDo(f"the gateway cannot be told to `{action}`")

    async def _roll_back(self) -> None:
        """The command itself, as an operator would run it."""
        command = [sys.executable, "-m", "kvrelay.cli.main", "rollback", "--router", self._admin.url]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
        _, said = await process.communicate()
        if process.returncode:
            raise CannotDo(
                f"`kvrelay rollback` ended with {process.returncode}: {said.decode(errors='replace').strip()}"
            )

    async def add(self, name: str, process: Process) -> None:
        events, replay = process.events.events, process.events.replay
        members = {"name": name, "url": process.url, "events": events, "replay": replay, "adapter": process.adapter}
        members |= {"kv_report": process.kv_report} if process.kv_report else {}
        await self._admin.call("POST", "/admin/workers", members)

    async def remove(self, name: str) -> None:
        await self._admin.call("DELETE", f"/admin/workers/{name}")

    # --- questions ---------------------------------------------------------------------------------------------------

    async def uses(self, lives: Mapping[str, str]) -> bool | None:
        try:
            view = await self._admin.view("", 0.0)
        except aiohttp.ClientError:
            return False
        seen = {worker.name: worker.life for worker in view.workers if worker.routable}
        return all(seen.get(name) == life for name, life in lives.items())

    async def view(self, label: str, at_s: float) -> View:
        return await self._admin.view(label, at_s)

    async def claims(self, text: Text) -> dict[str, int] | None:
        return await self._admin.claims(text, self._model)

    async def salt(self) -> str | None:
        return await self._admin.salt()

    async def receipts(self) -> list[Receipt] | None:
        if self._setup.receipts_on_full_disk:
            answer = await self._admin.get(f"/admin/receipts?limit={MAX_RECEIPTS}")
            return msgspec.convert(answer, _Recent).receipts
        path = self._folder / "receipts.jsonl"
        return list(read_receipts(path)) if path.exists() else []

    async def receipts_dropped(self) -> int | None:
        dropped: int = (await self._admin.get("/admin/status"))["gateway"]["receipts_dropped"]
        return dropped
