"""Our own mock worker: vLLM's dialect, and an incarnation that it states itself."""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp
import msgspec
from msgspec import Struct

from kvrelay.edge.connectors import ask
from kvrelay.edge.connectors.base import Description
from kvrelay.edge.connectors.vllm import describe
from kvrelay.edge.connectors.vllm.connector import VllmConnector
from kvrelay.edge.system.urls import join_url


class _State(Struct):
    incarnation: str
    events_mode: str = "bind"


class MockConnector(VllmConnector):
    name = "mock"
    owned_by = None  # it says in a header that it is one

    async def describe(self, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> Description:
        state = await ask.get_json(session, join_url(url, "/mock/state"), headers, _State)
        description = await describe.describe(
            session,
            url,
            headers,
            engine=self.name,
            worker_binds=lambda endpoint: state.events_mode == "bind",  # on loopback too, which vLLM cannot
        )
        spec = msgspec.structs.replace(description.spec, models_payload=False)
        return msgspec.structs.replace(description, spec=spec, incarnation=state.incarnation)

    async def sharing(
        self,
        session: aiohttp.ClientSession,
        url: str,
        headers: Mapping[str, str],
        *,
        kv_report: str | None,
        on: bool | None,
    ) -> bool | None:
        return await ask.sharing(session, join_url(url, "/mock/sharing"), headers, on)
