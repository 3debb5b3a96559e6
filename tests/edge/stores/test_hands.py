"""Who does what: a hand that ends a fetch does the next one, and nothing is begun after the end."""

from __future__ import annotations

import threading
from functools import partial

from kvrelay.core.tiers.effects import Ping
from kvrelay.core.tiers.outcome import Outcome
from kvrelay.edge.stores.memory import MemoryStore
from kvrelay.edge.stores.runtime import Threads
from kvrelay.edge.stores.tiered import TieredStore
from tests.edge.stores.test_outages import Remote
from tests.edge.stores.test_tiered import KEYS, NAMESPACE, SHAPE

JOB = Ping(1, 0, 1.0)


class ThreadsOfReads(Remote):
    """Says which thread read."""

    def __init__(self) -> None:
        super().__init__()
        self.readers: list[int] = []

    def read_into(self, *given: object, **also: object) -> int | None:
        self.readers.append(threading.get_ident())
        return super().read_into(*given, **also)  # type: ignore[arg-type]


def test_fetches_of_one_load_change_threads_no_more_often_than_there_are_slots() -> None:
    medium = ThreadsOfReads()
    tiers = {"tiers": [{"url": "memory://", "max_fetches": 2}], "deadline_ms": 5_000}
    store = TieredStore.open(tiers, stores=[medium])
    try:
        for key in KEYS:
            assert store.store(NAMESPACE, key, SHAPE, [bytes(SHAPE.payload_bytes)]).stored
        into = [memoryview(bytearray(SHAPE.payload_bytes)) for _ in KEYS]
        assert set(store.fetch(store.plan(NAMESPACE, KEYS, SHAPE), into).outcomes) == {Outcome.HIT}
        assert len(medium.readers) == len(KEYS) > 2 and len(set(medium.readers)) <= 2
    finally:
        store.close()


def test_a_hand_that_goes_on_is_the_one_that_called() -> None:
    crew, seen, done = Threads().crew("test", MemoryStore(), 2), list[int](), threading.Event()

    def work(left: int) -> None:
        seen.append(threading.get_ident())
        if left:
            crew.go_on(partial(work, left - 1), JOB)
        else:
            done.set()

    crew.submit(partial(work, 3))
    assert done.wait(5) and len(seen) == 4 and len(set(seen)) == 1
    done.clear()
    crew.go_on(partial(work, 0), JOB)  # from a thread that is not of the crew: one of its hands does it
    assert done.wait(5) and len(seen) == 5 and seen[-1] != threading.get_ident()
    crew.close()


def test_nothing_is_begun_after_the_end() -> None:
    crew, begun, may_end = Threads().crew("test", MemoryStore(), 1), threading.Event(), threading.Event()
    late: list[str] = []

    def work() -> None:
        begun.set()
        may_end.wait(5)
        crew.go_on(lambda: late.append("begun"), JOB)

    crew.submit(work)
    assert begun.wait(5)
    closing = threading.Thread(target=crew.close)
    closing.start()
    while closing.is_alive() and not crew._closed:  # type: ignore[attr-defined]
        pass
    may_end.set()
    closing.join(5)
    assert not closing.is_alive() and late == []
