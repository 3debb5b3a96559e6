"""The gateway of one arm: `kvrelay serve` in a process group of its own, so that it can be ended as a whole."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from kvrelay.core.model.units import IndexState

STOP_TIMEOUT_S = 6.0
POLL_S = 0.05
_PR_SET_PDEATHSIG = 1


class GatewayStartError(Exception):
    """The gateway ended, stayed silent, or did not see its workers in time."""


class GatewayReady(msgspec.Struct):
    """The line that `serve --json` prints when it listens."""

    url: str
    admin_url: str
    pid: int


class GatewayProcess:
    """`async with GatewayProcess(config, log=...) as gateway`: leaving the block ends the whole group in any case."""

    def __init__(self, config: Path, *, log: Path, ready_timeout_s: float) -> None:
        self._config = config
        self._log = log
        self._ready_timeout_s = ready_timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self.ready: GatewayReady

    async def __aenter__(self) -> Self:
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "kvrelay.cli.main", "serve", "-c", str(self._config), "--json",
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=log, start_new_session=True,
                preexec_fn=_end_with_parent,
            )  # fmt: skip
        try:
            self.ready = await self._read_ready_line(self._process)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._stop()

    async def _read_ready_line(self, process: asyncio.subprocess.Process) -> GatewayReady:
        assert process.stdout is not None
        try:
            async with asyncio.timeout(self._ready_timeout_s):
                line = await process.stdout.readline()
            return msgspec.json.decode(line, type=GatewayReady)
        except (TimeoutError, msgspec.DecodeError) as problem:
            raise GatewayStartError(
                f"the gateway did not say it was ready; its log ends with:{self._log_tail()}"
            ) from (problem)

    async def wait_for_workers(
        self, names: Sequence[str], *, timeout_s: float | None = None, without_events: Sequence[str] = ()
    ) -> int:
        """Until every worker is up and its residency index is live: an arm must not start half blind.

        Of workers that publish no events the index is a guess and stays one; they only have to be up.

        Returns how many blocks the index holds then, which is 0 for a fresh fleet. Waits as long as for the gateway
        itself, if not told otherwise.
        """
        status: dict[str, Any] = {}
        try:
            async with asyncio.timeout(timeout_s or self._ready_timeout_s), aiohttp.ClientSession() as session:
                while not _all_live(status, names, without_events):
                    status = await self._status(session)
                    await asyncio.sleep(POLL_S)
        except (TimeoutError, aiohttp.ClientError) as problem:
            raise GatewayStartError(
                f"not all of {', '.join(names)} became usable; the gateway's log ends with:{self._log_tail()}"
            ) from problem
        return int(status["index_blocks"])

    async def status(self) -> dict[str, Any]:
        """What `/admin/status` says now."""
        async with aiohttp.ClientSession() as session:
            return await self._status(session)

    async def _status(self, session: aiohttp.ClientSession) -> dict[str, Any]:
        async with session.get(f"{self.ready.admin_url}/admin/status") as response:
            found: dict[str, Any] = await response.json()
            return found

    def signal(self, number: signal.Signals) -> None:
        """To all of its processes."""
        assert self._process is not None
        _signal_group(self._process.pid, number)

    async def _stop(self) -> None:
        """SIGTERM and a bounded wait for the drain, then SIGKILL to what is left of the group."""
        process = self._process
        assert process is not None
        try:
            if process.returncode is None:
                # Not process.terminate(): it would reap a child that has just ended, and asyncio would miss its status.
                _signal_group(process.pid, signal.SIGTERM)
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await process.wait()
        except TimeoutError:
            pass
        finally:
            _signal_group(process.pid, signal.SIGKILL)
            await process.wait()

    def _log_tail(self) -> str:
        return "\n  " + "\n  ".join(self._log.read_text(errors="replace").splitlines()[-8:])


def _all_live(status: dict[str, Any], names: Sequence[str], without_events: Sequence[str]) -> bool:
    workers = {worker["name"]: worker for worker in status.get("workers", ())}
    return all(
        name in workers
        and workers[name]["routable"]
        and (
            name in without_events
            or all(target["index_state"] == IndexState.LIVE for target in workers[name]["targets"])
        )
        for name in names
    )


def _end_with_parent() -> None:
    """In the child: when we are killed in a way that runs no clean-up, the kernel ends the gateway (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        pass  # nothing of it is left, as it should be
