"""What only the garbage collector can free. A gateway lets it run rarely, so what is ours must not need it."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


def found_garbage(module: str = "") -> Counter[str]:
    """What the collector finds now, by type; of types whose module begins so."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return Counter(type(each).__qualname__ for each in gc.garbage if type(each).__module__.startswith(module))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.collect()


@contextmanager
def ours_left_as_garbage() -> Iterator[Counter[str]]:
    """Which types of this package are in cycles that the block leaves behind; filled when it ends."""
    left: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    try:
        yield left
        left.update(found_garbage("kvrelay"))
    finally:
        gc.enable()
