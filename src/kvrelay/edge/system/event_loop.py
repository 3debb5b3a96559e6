"""The event loop of a gateway process, and how often Python looks for garbage in it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def calm_the_collector() -> None:
    """Collecting as often as Python does by default finds nothing here (the request path makes no cycles, the index
    holds no containers) and costs a third of the CPU time. It still runs, for what libraries and errors leave."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
