"""What only the garbage collector can free. A gateway lets it run rarely, so what is ours must not need it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ours_left_as_garbage() -> Iterator[set[str]]:
    """Which types of this package are in cycles that the block leaves behind; filled when it ends."""
    left: set[str] = set()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield left
        gc.collect()
        left |= {type(each).__qualname__ for each in gc.garbage if type(each).__module__.startswith("kvrelay")}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
