"""What the real-engine tests do to a gateway: turns of growing sessions, and questions on the admin port."""

from __future__ import annotations

import json
import random
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from kvrelay.core.receipts.receipt import Receipt
from tests.real.engine import MODEL_NAME

VOCABULARY = 256


class Client:
    def __init__(self, url: str, admin_url: str, receipts: Path) -> None:
        self._url = url
        self.admin_url = admin_url
        self._receipts = receipts

    def complete(self, prompt: list[int], *, session: str = "s", stream: bool = False, **more: Any) -> bytes:
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **more}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return self.post("/v1/completions", body, {"x-session-id": session})

    def post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> bytes:
        headers = {"content-type": "application/json", **(headers or {})}
        request = urllib.request.Request(self._url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=300) as response:
            return response.read()  # type: ignore[no-any-return]

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.admin_url}/admin/status", timeout=30) as response:
            return json.load(response)  # type: ignore[no-any-return]

    def workers(self) -> list[dict[str, Any]]:
        return self.status()["workers"]  # type: ignore[no-any-return]

    def incarnation(self, url: str) -> str:
        """The life that the gateway knows of the worker at this address."""
        return next(w["incarnation"] for w in self.workers() if w["url"] == url)

    def wait_for_live(self, count: int, index_state: str = "live") -> None:
        """Until so many workers are routable with an index in that state."""
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            workers = self.workers()
            live = [w for w in workers if w["routable"] and all(t["index_state"] == index_state for t in w["targets"])]
            if len(live) == count:
                return
            time.sleep(0.1)
        raise TimeoutError(f"not {count} live workers: {self.workers()}")

    def receipts(self, count: int) -> list[Receipt]:
        """All receipts once there are `count` of them (they are written beside the request path)."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            lines = self._receipts.read_bytes().splitlines() if self._receipts.exists() else []
            if len(lines) >= count:
                return [msgspec.json.decode(line, type=Receipt) for line in lines]
            time.sleep(0.05)
        raise TimeoutError(f"{count} receipts expected")


class Sessions:
    """Conversations that share a head and grow turn by turn; the same seed gives the same prompts."""

    def __init__(self, count: int, *, seed: int) -> None:
        self._chance = random.Random(seed)
        head = self.tokens(320)
        self.prompts = {f"s{i}": head + self.tokens(self._chance.randrange(200, 900)) for i in range(count)}

    def tokens(self, count: int) -> list[int]:
        return [self._chance.randrange(VOCABULARY) for _ in range(count)]

    def play(self, client: Client, *, turns: int, at_once: int = 3) -> int:
        """Every session takes its turns, some streamed and some not; answers how many requests that were."""
        for _ in range(turns):
            plan = [(name, list(prompt), self._chance.random() < 0.5) for name, prompt in self.prompts.items()]
            with ThreadPoolExecutor(at_once) as threads:
                list(threads.map(lambda turn: client.complete(turn[1], session=turn[0], stream=turn[2]), plan))
            for name in self.prompts:
                self.prompts[name] = self.prompts[name] + self.tokens(self._chance.randrange(40, 300))
        return turns * len(self.prompts)
