"""A fleet of mock worker processes behind a front, all on this machine: real sockets, signals and time."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

import aiohttp
from msgspec.structs import replace

from kvrelay.core.receipts.receipt import Receipt
from kvrelay.lab.drills import actions as act
from kvrelay.lab.drills.drill import Drill, Look, Send, Settle, StorePlan, Turn, WorkerPlan
from kvrelay.lab.drills.fleets.base import CannotDo
from kvrelay.lab.drills.fleets.client import Seen, complete
from kvrelay.lab.drills.fleets.front import Front
from kvrelay.lab.drills.fleets.our_gateway import OurGateway
from kvrelay.lab.drills.fleets.processes import Process, Processes, shuffle_script
from kvrelay.lab.drills.fleets.shared_store import SharedStore
from kvrelay.lab.drills.fleets.targets import resolve
from kvrelay.lab.drills.history import Deed, Held, History, Outcome, Settled
from kvrelay.lab.drills.prompts import Text
from kvrelay.lab.drills.reference import MODEL, right_text, salt_of

POLL_S = 0.05
GONE_WITHIN_S = 30.0
RECEIPTS_WITHIN_S = 3.0
UNSEEN_SETTLING_S = 3.0  # for a front that does not say whom it uses


class MockProcessFleet:
    """`folder` keeps the front's configuration, log and receipts; None: they go with the fleet."""

    kind = "mock"

    def __init__(self, drill: Drill, *, front: Front | None = None, folder: Path | None = None) -> None:
        self._setup = drill.setup
        self.model = MODEL
        self._front = front or OurGateway()
        self._processes = Processes(drill.setup)
        self._given = folder
        self._began_s = time.monotonic()
        self._served: list[tuple[str | None, str | None]] = []
        self._lives: dict[str, str] = {}  # life -> worker
        self.history = History(drill=drill.name, fleet=self.kind, retry_attempts=drill.setup.retry_attempts)

    # --- life --------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._temporary = TemporaryDirectory(prefix="kvrelay-drill-")
        folder = self._given or Path(self._temporary.name)
        folder.mkdir(parents=True, exist_ok=True)
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        try:
            if self._setup.store is not None:
                self._processes.store = self._shared_store(self._setup.store, folder)
                await self._processes.store.start()
            await self._processes.add(self._setup.workers)
            self._note_lives()
            await self._front.start(self._setup, self._processes, folder)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        self._began_s = time.monotonic()
        return self

    def _shared_store(self, plan: StorePlan, folder: Path) -> SharedStore:
        return SharedStore(plan, folder)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._front.stop()
        await self._processes.stop()
        if self._processes.store is not None:
            await self._processes.store.stop()
        await self._http.close()
        self._temporary.cleanup()

    @property
    def now_s(self) -> float:
        return time.monotonic() - self._began_s

    def _note_lives(self) -> None:
        for name, process in self._processes.by_name.items():
            self._lives[process.running.incarnation] = name

    # --- requests ----------------------------------------------------------------------------------------------------

    async def send(self, number: int, step: Send) -> None:
        begins_s = self.now_s
        blows = [asyncio.ensure_future(self._blow(begins_s + at_s, action)) for at_s, action in step.blows]
        seen = await asyncio.gather(*(self._client(begins_s, turn) for turn in step.turns))
        await asyncio.gather(*blows)
        receipts = await self._receipts_of(step.turns)
        for turn, each in zip(step.turns, seen, strict=True):
            found = None if receipts is None else receipts.get(turn.id, [])
            self.history.outcomes.append(self._outcome(number, begins_s, turn, each, found))
        self._served += [(outcome.session, outcome.worker) for outcome in self.history.of_step(number)]
        if self._setup.receipts_on_full_disk:
            self.history.receipts_dropped = await self._front.receipts_dropped()
            self.history.notes["receipts_at_hand"] = sum(map(len, (receipts or {}).values()))

    async def _client(self, begins_s: float, turn: Turn) -> Seen:
        await asyncio.sleep(max(0.0, begins_s + turn.at_s - self.now_s))
        return await complete(self._http, self._front.url, turn, self.model, as_ids=self._front.takes_token_ids)

    async def _blow(self, at_s: float, action: act.Action) -> None:
        await asyncio.sleep(max(0.0, at_s - self.now_s))
        await self.do(action)

    async def _receipts_of(self, turns: Sequence[Turn]) -> dict[str, list[Receipt]] | None:
        """They are written a moment after the answer; what is not there in time is missing."""
        deadline_s = time.monotonic() + RECEIPTS_WITHIN_S
        while True:
            receipts = await self._front.receipts()
            if receipts is None:
                return None
            found: dict[str, list[Receipt]] = {}
            for receipt in receipts:
                found.setdefault(receipt.request_id, []).append(receipt)
            if all(turn.id in found for turn in turns) or time.monotonic() > deadline_s:
                return found
            await asyncio.sleep(POLL_S)

    def _outcome(self, number: int, begins_s: float, turn: Turn, seen: Seen, receipts: list[Receipt] | None) -> Outcome:
        receipt = receipts[-1] if receipts else None
        sent_s, ended_s = seen.sent_s - self._began_s, seen.ended_s - self._began_s
        cut = seen.ending == "broken" and not receipts and self._front_restarted(sent_s, ended_s + POLL_S)
        unsent = seen.ending == "left" and not receipts  # perhaps before a byte of it was written: nobody can tell
        worker = seen.worker or self._lives.get(seen.life or "")
        return Outcome(
            id=turn.id,
            session=turn.session,
            tenant=turn.tenant,
            step=number,
            prompt_tokens=turn.text.tokens,
            at_s=begins_s + turn.at_s,
            sent_s=sent_s,
            ended_s=ended_s,
            ending="gateway_lost" if cut else seen.ending,
            http_status=seen.http_status,
            ttft_ms=None if seen.first_token_s is None else round((seen.first_token_s - seen.sent_s) * 1000, 3),
            text=seen.text,
            texts=self._right_texts(turn, receipt),
            worker=worker if receipt is None else receipt.chosen_worker,
            life=seen.life if receipt is None else receipt.incarnation,
            cached_tokens=seen.cached_tokens,
            wrong_reuse_blocks=seen.wrong_reuse_blocks,
            receipt=receipt,
            receipts=None if receipts is None or unsent else len(receipts),
        )

    def _front_restarted(self, sent_s: float, ended_s: float) -> bool:
        deeds = (deed for deed in self.history.deeds if deed.kind == "RestartGateway")
        return any(sent_s <= deed.at_s <= ended_s for deed in deeds)

    def _right_texts(self, turn: Turn, receipt: Receipt | None) -> dict[str, str]:
        salt = salt_of(None if receipt is None else receipt.epoch, turn.tenant)
        revisions = dict.fromkeys(process.plan.revision for process in self._processes.by_name.values())
        return {
            revision: right_text(turn.text, turn.max_tokens, revision, turn.adapter, salt, self._front.takes_token_ids)
            for revision in revisions
        }

    # --- what is done ------------------------------------------------------------------------------------------------

    async def do(self, action: act.Action) -> None:
        name = resolve(action.target, self._served, self.history.deeds)
        process = self._processes.by_name.get(name or "")
        life = None if process is None else process.running.incarnation
        began_s = self.now_s
        await self._carry_out(action, name, process)
        self.history.deeds.append(
            Deed(
                at_s=began_s, done_s=self.now_s, action=str(action), kind=type(action).__name__, worker=name, life=life
            )
        )

    async def _carry_out(self, action: act.Action, name: str | None, process: Process | None) -> None:
        match action:
            case act.RestartGateway():
                await self._front.restart()
            case act.StoreDown() | act.StoreUp() | act.SpoilStore() | act.WipeStore() | act.CountReads():
                self._strike_store(action)
            case act.Pause():
                await self._front.pause(action.seconds)
            case act.AddWorker():
                await self._processes.add([WorkerPlan(name=action.worker, revision=action.revision)])
                self._note_lives()
                await self._front.add(action.worker, self._processes.by_name[action.worker])
            case act.RemoveWorker():
                await self._front.remove(action.worker)
            case act.Start():
                assert name is not None
                await self._processes.restart(name)
                self._note_lives()
            case _ if process is not None:
                await self._strike(action, process)
            case _:
                await self._front.do(action)

    def _strike_store(self, action: act.Action) -> None:
        store = self._processes.store
        if store is None:
            raise CannotDo("this drill's workers share no store")
        match action:
            case act.StoreDown(how):
                store.network.do("refuse; reset" if how == "refuse" else "stall")
            case act.StoreUp():
                store.network.do("clear")
                store.content.how = None
            case act.SpoilStore(how):
                store.content.how = how
            case act.WipeStore():
                store.content.wipe()
            case act.CountReads():
                store.content.begin_counting()

    async def _strike(self, action: act.Action, process: Process) -> None:
        running, network, events = process.running, process.network, process.events
        match action:
            case act.Kill():
                running.signal(signal.SIGKILL)
                for _ in range(round(GONE_WITHIN_S / POLL_S)):
                    if not running.alive:
                        break
                    await asyncio.sleep(POLL_S)
            case act.Terminate():
                running.signal(signal.SIGTERM)
            case act.Freeze():
                running.signal(signal.SIGSTOP)
                process.frozen = True
            case act.Thaw():
                running.signal(signal.SIGCONT)
                process.frozen = False
            case act.Refuse():
                fault = {"kind": str(action.http_status), "count": action.count, "path": "/v1/completions"}
                await self._worker_call(process, "/mock/faults", fault)
            case act.Partition():
                network.do("stall")
                events.do("hold all until release; replay off")
            case act.Slow():
                network.do(f"latency {round(action.delay_s * 1000)}ms")
            case act.MendNetwork():
                network.do("clear")
                events.do("clear; replay on")
            case act.LoseEvents():
                first = process.events.next_seq
                events.do("drop all" if action.batches is None else f"drop {first}-{first + action.batches - 1}")
            case act.DoubleEvents():
                events.do("duplicate all")
            case act.ShuffleEvents():
                events.do(shuffle_script(process.events.next_seq))
            case act.SilenceReplay():
                events.do("replay off")
            case act.MendEvents():
                events.do("clear; replay on")
            case _:
                raise CannotDo(f"a mock worker cannot do `{action}`")

    async def _worker_call(self, process: Process, path: str, body: dict[str, Any]) -> Any:
        """Around the proxies: whoever looks must not be in the way of what is broken."""
        async with self._http.post(process.running.url + path, json=body) as response:
            return await response.json()

    # --- time and sight ----------------------------------------------------------------------------------------------

    async def wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def settle(self, step: Settle) -> None:
        alive = {name: process.running for name, process in self._processes.by_name.items() if process.running.alive}
        wanted = step.workers or tuple(alive)
        lives = {name: alive[name].incarnation for name in wanted}
        began_s = self.now_s
        while self.now_s < began_s + step.within_s:
            used = await self._front.uses(lives)
            if used is None:
                await asyncio.sleep(UNSEEN_SETTLING_S)
            if used is not False:
                self.history.settled.append(Settled(self.now_s - began_s, wanted))
                return
            await asyncio.sleep(POLL_S)
        self.history.settled.append(Settled(None, wanted))

    async def look(self, step: Look) -> None:
        view = await self._front.view(step.label, self.now_s)
        held: list[Held] = []
        salt = await self._front.salt() if step.texts else None
        for number, text in enumerate(step.texts):
            claims = await self._front.claims(text) or {}
            for name, process in self._processes.by_name.items():
                real = await self._real(process, text, salt)
                held.append(Held(text=number, worker=name, claimed=claims.get(name), real=real))
        store = None if self._processes.store is None else self._processes.store.content.figures()
        self.history.views.append(replace(view, held=tuple(held), store=store))

    async def _real(self, process: Process, text: Text, salt: str | None) -> int | None:
        if not process.running.alive or process.frozen:
            return None
        prompt = text.token_ids().tolist() if self._front.takes_token_ids else text.letters()
        question = {"prompt": prompt, "cache_salt": salt}
        tokens: int = (await self._worker_call(process, "/mock/holds", question))["tokens"]
        return tokens
