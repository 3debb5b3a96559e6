"""What a drill asks of a gateway's admin port, and of a mock worker: questions in, plain values out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from kvrelay.core.routing.epochs import Epochs, EpochState
from kvrelay.lab.drills.fleets.base import CannotDo
from kvrelay.lab.drills.history import View, WorkerView
from kvrelay.lab.drills.prompts import Text
from kvrelay.lab.drills.reference import salt_of

REPORTS = 'kvrelay_reports_total{kind="'


class AdminPort:
    """`url` may change when the gateway is started again."""

    def __init__(self, http: aiohttp.ClientSession, url: str, token: str | None = None) -> None:
        self.url = url
        self._http = http
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}

    async def get(self, path: str) -> Any:
        """Raises aiohttp.ClientError when nobody answers, CannotDo for a refusal."""
        return await self.call("GET", path)

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        async with self._http.request(method, self.url + path, json=body, headers=self._headers) as response:
            answer = await response.read()
            if response.status >= 400:
                raise CannotDo(
                    f"{method} {path} was answered {response.status}: {answer.decode('utf-8', 'replace')[:300]}"
                )
            return msgspec.json.decode(answer)

    async def view(self, label: str, at_s: float) -> View:
        """Without what is held."""
        status = await self.get("/admin/status")
        return View(
            label=label,
            at_s=at_s,
            workers=tuple(_worker(worker) for worker in status["workers"]),
            live_requests=status["live_requests"],
            index_blocks=status["index_blocks"],
            policy=status["policy"],
            reports=await self.reports(),
        )

    async def reports(self) -> dict[str, int]:
        async with self._http.get(self.url + "/metrics", headers=self._headers) as response:
            page = await response.text()
        found = {}
        for line in page.splitlines():
            if line.startswith(REPORTS):
                kind, _, value = line.removeprefix(REPORTS).partition('"} ')
                found[kind] = int(float(value))
        return found

    async def claims(self, text: Text, model: str | None) -> dict[str, int]:
        """Tokens that each candidate is believed to hold."""
        question = {"prompt": text.token_ids().tolist(), **({} if model is None else {"model": model})}
        answer = await self.call("POST", "/admin/match", question)
        return {each["worker"]: each["tiers"].get("gpu", 0) for each in answer["candidates"]}

    async def salt(self) -> str | None:
        """Of requests that come now, without a tenant of their own."""
        state = msgspec.convert((await self.get("/admin/status"))["epochs"], EpochState)
        return salt_of(Epochs(state).tag("default", None))


def _worker(worker: Mapping[str, Any]) -> WorkerView:
    target = worker["targets"][0]
    return WorkerView(
        name=worker["name"],
        life=worker["incarnation"],
        routable=worker["routable"],
        index_state=target["index_state"],
        index_blocks=sum(target["index_blocks"].values()),
        active_requests=sum(each["active_requests"] for each in worker["targets"]),
        next_event_seq=target["next_event_seq"],
    )
