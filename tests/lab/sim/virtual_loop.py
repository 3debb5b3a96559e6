"""An asyncio loop whose clock jumps to the next timer as soon as nothing else is to be done."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _NoWaiting(selectors.SelectSelector):
    """Instead of waiting it lets the loop's clock jump."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("nobody will ever wake this loop: no timer, no callback")
        if timeout > 0:
            self.loop.jump()
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at 0. Real sockets do not work on it, and are not needed."""

    def __init__(self) -> None:
        self._now_s = 0.0
        selector = _NoWaiting()
        super().__init__(selector)
        selector.loop = self
        self._clock_resolution = 1e-10  # what counts as the same moment; a timer that is due now has to

    def time(self) -> float:
        return self._now_s

    def jump(self) -> None:
        self._now_s = max(self._now_s, self._scheduled[0].when())  # type: ignore[attr-defined]


def run_virtually(work: Coroutine[Any, Any, None]) -> None:
    """The first error of any callback ends it."""
    loop = VirtualLoop()
    errors: list[BaseException] = []

    def failed(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        errors.append(context.get("exception") or RuntimeError(context["message"]))
        loop.stop()

    loop.set_exception_handler(failed)
    task = loop.create_task(work)
    task.add_done_callback(lambda _: loop.stop())
    try:
        loop.run_forever()
        if errors:
            task.cancel()
            raise errors[0]
        task.result()
    finally:
        loop.close()
