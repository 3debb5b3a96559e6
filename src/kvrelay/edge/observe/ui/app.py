"""`/ui`: the live page and what it asks for. The files hold no data, so they need no token; everything else does."""

from __future__ import annotations

import asyncio
from importlib import resources

import msgspec
from aiohttp import web

from kvrelay.core.receipts.receipt import Receipt
from kvrelay.edge.observe.explain import explain, terms_add_up
from kvrelay.edge.observe.receipt_words import REASONS, TERMS
from kvrelay.edge.observe.runbook import runbook
from kvrelay.edge.observe.ui.page import runbook_page
from kvrelay.edge.observe.ui.picture import Painter
from kvrelay.edge.observe.ui.results import Results, read_results
from kvrelay.edge.observe.ui.source import Source
from kvrelay.edge.observe.ui.stream import TICK_S, Stream
from kvrelay.edge.system.clock import monotonic_s, wall_s

STREAM_PATH, RECEIPT_PATH = "/ui/stream", "/ui/receipts/{request_id}"
RUNBOOKS_PATH = "/ui/runbooks"
RESULTS_EVERY_S = 10.0
WORDS = {"reasons": REASONS, "terms": TERMS}
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Ui:
    """Files are read once; `routes()` belong on an admin port."""

    def __init__(self, source: Source, *, tick_s: float = TICK_S) -> None:
        self._source = source
        self._painter = Painter(source)
        self.stream = Stream(self._paint, tick_s=tick_s)
        self._results = Results(folder=None)
        self._results_at_s = float("-inf")
        folder = resources.files("kvrelay.edge.observe.ui") / "static"
        self._files = {f"/ui/{file.name}": (file.read_bytes(), _type(file.name)) for file in folder.iterdir()}
        self._files["/ui"] = self._files["/ui/"] = self._files["/ui/index.html"]
        self._files["/ui/words.json"] = (msgspec.json.encode(WORDS), "application/json")
        self._files[RUNBOOKS_PATH] = (runbook_page(runbook()).encode(), "text/html")

    def is_public(self, request: web.Request) -> bool:
        """What shows nothing of this gateway."""
        return request.method in ("GET", "HEAD") and request.path in self._files

    def routes(self) -> list[web.RouteDef]:
        files = [web.get(path, self._file) for path in self._files]
        return [*files, web.get(STREAM_PATH, self.stream.serve), web.get(RECEIPT_PATH, self._receipt)]

    async def close(self, app: web.Application) -> None:
        await self.stream.close()

    async def _file(self, request: web.Request) -> web.Response:
        body, content_type = self._files[request.path]
        return web.Response(body=body, content_type=content_type, charset="utf-8", headers=_HEADERS)

    async def _receipt(self, request: web.Request) -> web.Response:
        """In words, with whether the arithmetic of its candidates holds."""
        found = await self._source.receipt(request.match_info["request_id"])
        if found is None:
            raise web.HTTPNotFound(text="no such receipt among the last ones; older ones are in the file")
        receipt = msgspec.convert(found, Receipt)
        told = {
            "text": explain(receipt),
            "receipt": receipt,
            "adds_up": all(terms_add_up(candidate) for candidate in receipt.candidates),
        }
        return web.Response(body=msgspec.json.encode(told), content_type="application/json")

    async def _paint(self) -> bytes:
        now_s = monotonic_s()
        if now_s - self._results_at_s >= RESULTS_EVERY_S:
            self._results = await asyncio.to_thread(read_results, self._source.results_folder())
            self._results_at_s = now_s
        return await self._painter.paint(now_s=now_s, wall_s=wall_s(), results=self._results)


def _type(name: str) -> str:
    return _TYPES["." + name.rpartition(".")[2]]
