"""One process of a group, as the group sees it: started, asked, told, and started again when it has died."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping

import aiohttp
import msgspec
from msgspec import Struct

from kvrelay.edge.group.frames import Failed
from kvrelay.edge.group.orders import Orders

ASK_TIMEOUT_S = 3.0  # those who read metrics give up after ten seconds
CHANGE_TIMEOUT_S = 10.0
START_TIMEOUT_S = 60.0


class Answer(Struct, frozen=True):
    """Of a process to an admin request."""

    status: int
    content_type: str
    body: bytes

    @property
    def ok(self) -> bool:
        return self.status < 400


class NoAnswer(Exception):
    """The process did not answer: it died, or hangs."""


class Member:
    """One life after the other under the same number."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.restarts = 0
        self.ready = False
        self.cut = 0
        self.failure: Failed | None = None
        self.started_at = 0.0
        self._process: asyncio.subprocess.Process | None = None
        self._session: aiohttp.ClientSession | None = None
        self._word = asyncio.Event()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.started_at

    async def start(self, orders: Orders) -> bool:
        """True: it takes requests. False: it could not start, and `failure` says why if it said so."""
        self.ready, self.failure, self.cut = False, None, 0
        self._word.clear()
        self.started_at = time.monotonic()
        await self._open_session(orders.admin_socket)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvrelay.edge.group.child",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(orders))
        self._process.stdin.close()
        ended = asyncio.ensure_future(self._process.wait())
        spoke = asyncio.ensure_future(self._word.wait())
        await asyncio.wait((ended, spoke), timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        for waiting in (ended, spoke):
            waiting.cancel()
        if not self.ready:
            self.kill()
            await self._process.wait()
        return self.ready

    async def ended(self) -> int:
        """Waits for its end; the exit status, negative for a signal."""
        assert self._process is not None
        status = await self._process.wait()
        self.ready = False
        return status

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def close(self) -> None:
        """After its end."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    # --- what it said ------------------------------------------------------------------------------------------------

    def is_ready(self) -> None:
        self.ready = True
        self._word.set()

    def has_failed(self, failure: Failed) -> None:
        self.failure = failure
        self._word.set()

    # --- questions ---------------------------------------------------------------------------------------------------

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        within_s: float = ASK_TIMEOUT_S,
    ) -> Answer:
        """Of its own admin API. Raises NoAnswer."""
        if self._session is None:
            raise NoAnswer(f"process {self.number} is not running")
        try:
            async with self._session.request(
                method,
                f"http://process{path}",
                data=body or None,
                headers=headers,
                skip_auto_headers=("Content-Type",),
                timeout=aiohttp.ClientTimeout(total=within_s),
            ) as response:
                return Answer(response.status, response.headers.get("Content-Type", ""), await response.read())
        except (aiohttp.ClientError, OSError, TimeoutError) as problem:
            raise NoAnswer(f"process {self.number}: {problem or type(problem).__name__}") from problem

    async def _open_session(self, admin_socket: str) -> None:
        await self.close()
        self._session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(path=admin_socket, limit=0))
