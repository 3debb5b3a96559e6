"""What every store promises, as tests. A new store gets a `store` fixture and has to pass all of it.

Keys are as in practice: 40 bytes, of which the first eight are the tenant's.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from kvrelay.edge.stores.store import Store, StoreError, WriteOutcome

S = 5.0  # deadline; nothing here should need a hundredth of it


def key(number: int, *, tenant: int = 0) -> bytes:
    return tenant.to_bytes(8, "big") + number.to_bytes(32, "big")


def content(number: int, size: int = 5000) -> bytes:
    return bytes((number + i) % 251 for i in range(size))


def write(store: Store, name: bytes, *parts: bytes, only_if_absent: bool = True) -> WriteOutcome:
    return store.write(name, parts, only_if_absent=only_if_absent, deadline_s=S)


def read_into(store: Store, name: bytes, sizes: Sequence[int]) -> tuple[int | None, bytes]:
    memory = [bytearray(size) for size in sizes]
    size = store.read_into(name, [memoryview(part) for part in memory], deadline_s=S)
    return size, b"".join(memory)


class StoreSuite:
    """Tests of one store, given by the fixture `store`."""

    def test_gives_back_what_was_written(self, store: Store) -> None:
        parts = (content(1, 512), memoryview(bytearray(content(2, 70_000))), content(3, 1))
        assert write(store, key(1), *parts) is WriteOutcome.WRITTEN
        whole = b"".join(parts)
        found = store.read(key(1), deadline_s=S)
        assert found is not None and bytes(found) == whole
        assert read_into(store, key(1), (512, 70_000, 1)) == (len(whole), whole)
        assert store.sizes([key(1)], deadline_s=S) == [len(whole)]

    def test_absent_is_an_answer(self, store: Store) -> None:
        assert store.read(key(1), deadline_s=S) is None
        assert read_into(store, key(1), (10,))[0] is None
        assert store.sizes([key(1), key(2)], deadline_s=S) == [None, None]
        assert store.contains([key(1)], deadline_s=S) == [False]
        assert store.delete([key(1)], deadline_s=S) == 0

    def test_contains_in_the_order_asked(self, store: Store) -> None:
        write(store, key(2), b"x")
        write(store, key(4), b"x")
        asked = [key(n) for n in (4, 1, 2, 3, 4)]
        assert store.contains(asked, deadline_s=S) == [True, False, True, False, True]
        assert store.contains([], deadline_s=S) == []

    @pytest.mark.covers("TR-19")
    def test_the_second_writer_of_a_name_changes_nothing(self, store: Store) -> None:
        write(store, key(1), content(1))
        assert write(store, key(1), content(2)) is WriteOutcome.EXISTS
        assert bytes(store.read(key(1), deadline_s=S) or b"") == content(1)

    def test_replaces_when_told_to(self, store: Store) -> None:
        write(store, key(1), content(1))
        assert write(store, key(1), content(2, 9000), only_if_absent=False) is WriteOutcome.WRITTEN
        assert read_into(store, key(1), (9000,)) == (9000, content(2, 9000))

    def test_buffers_of_the_wrong_size_are_told_the_length(self, store: Store) -> None:
        write(store, key(1), content(1))
        assert read_into(store, key(1), (4000,))[0] == 5000
        assert read_into(store, key(1), (4000, 4000))[0] == 5000
        assert read_into(store, key(1), (5000,)) == (5000, content(1)), "the connection is out of step"

    def test_deletes_only_what_it_is_told(self, store: Store) -> None:
        for n in range(3):
            write(store, key(n), content(n))
        assert store.delete([key(0), key(2), key(9)], deadline_s=S) == 2
        assert store.contains([key(0), key(1), key(2)], deadline_s=S) == [False, True, False]
        assert write(store, key(0), content(7)) is WriteOutcome.WRITTEN
        assert bytes(store.read(key(0), deadline_s=S) or b"") == content(7)

    def test_scans_by_prefix(self, store: Store) -> None:
        for n in range(5):
            write(store, key(n, tenant=n % 2), content(n, 100 + n))
        write(store, key(0, tenant=42) + b"/*?[", content(9, 7))
        found = {info.key: info.stored_bytes for info in store.scan(deadline_s=S)}
        assert found == {**{key(n, tenant=n % 2): 100 + n for n in range(5)}, key(0, tenant=42) + b"/*?[": 7}
        of_one = {info.key for info in store.scan((1).to_bytes(8, "big"), deadline_s=S)}
        assert of_one == {key(1, tenant=1), key(3, tenant=1)}
        assert [info.key for info in store.scan(key(0, tenant=42), deadline_s=S)] == [key(0, tenant=42) + b"/*?["]

    def test_a_name_may_have_any_bytes(self, store: Store) -> None:
        names = [bytes([n]) * 40 for n in (0, 10, 13, 37, 42, 47, 92, 255)] + [b"a", b"z" * 64]
        for n, name in enumerate(names):
            write(store, name, content(n))
        for n, name in enumerate(names):
            assert bytes(store.read(name, deadline_s=S) or b"") == content(n)
        assert {info.key for info in store.scan(deadline_s=S)} == set(names)

    def test_large_objects(self, store: Store) -> None:
        large = content(5, 251) * 16_000  # 4 MB
        write(store, key(1), large[:512], memoryview(large)[512:])
        assert read_into(store, key(1), (512, len(large) - 512)) == (len(large), large)

    def test_answers_a_ping(self, store: Store) -> None:
        store.ping(deadline_s=S)
        write(store, key(1), content(1))
        assert store.stats(deadline_s=S).objects == 1

    @pytest.mark.covers("S36")
    def test_readers_see_all_or_nothing_of_four_writers(self, store: Store) -> None:
        """The same name at once, other bytes each: one of them wins, whole, and readers never see a part."""
        versions = [bytes([n]) * 300_000 for n in range(4)]
        wrong: list[str] = []
        done = threading.Event()

        def reads() -> None:
            while not done.is_set():
                found = store.read(key(1), deadline_s=S)
                if found is not None and bytes(found) not in versions:
                    wrong.append(f"{len(bytes(found))} bytes that nobody wrote")

        outcomes: list[WriteOutcome] = []
        reader = threading.Thread(target=reads)
        writers = [threading.Thread(target=lambda v=v: outcomes.append(write(store, key(1), v))) for v in versions]
        reader.start()
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        done.set()
        reader.join()
        assert not wrong
        assert outcomes.count(WriteOutcome.WRITTEN) >= 1
        assert bytes(store.read(key(1), deadline_s=S) or b"") in versions

    def test_many_threads(self, store: Store) -> None:
        """Each thread its own names: nobody gets somebody else's bytes."""
        wrong: list[int] = []

        def works(thread: int) -> None:
            for n in range(20):
                number = 100 * thread + n
                write(store, key(number), content(number, 20_000))
                if read_into(store, key(number), (20_000,)) != (20_000, content(number, 20_000)):
                    wrong.append(number)

        threads = [threading.Thread(target=works, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    def test_closed_is_unavailable(self, store: Store) -> None:
        store.close()
        with pytest.raises(StoreError):
            write(store, key(1), b"x")
