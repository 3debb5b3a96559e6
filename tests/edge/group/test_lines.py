"""Frames, and what goes over the lines between a group and its processes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.model.effects import ShareSession
from kvrelay.core.model.events import Event, SessionPlaced, SiblingReported
from kvrelay.core.model.ids import SessionKey
from kvrelay.core.model.siblings import Placement, SiblingLoad
from kvrelay.edge.group.frames import Failed, FrameReader, Kind, decode_number, encode, frame
from kvrelay.edge.group.hub import Hub
from kvrelay.edge.group.link import Link, connect
from tests.edge.gateway.scripted import until

frames = st.lists(st.tuples(st.sampled_from(list(Kind)), st.binary(max_size=50)), max_size=8)


@given(frames, st.lists(st.integers(1, 20), min_size=1, max_size=20))
def test_frames_survive_any_cut(sent: list[tuple[Kind, bytes]], cuts: list[int]) -> None:
    data = b"".join(frame(kind, payload) for kind, payload in sent)
    reader, received, at, turn = FrameReader(), [], 0, 0
    while at < len(data):
        size = cuts[turn % len(cuts)]
        received += reader.feed(data[at : at + size])
        at, turn = at + size, turn + 1
    assert received == sent


@pytest.mark.parametrize(
    "problem", [OSError(98, "address in use"), FileNotFoundError(2, "no such file", "k.pem"), ValueError("bad key")]
)
def test_a_failure_arrives_as_what_it_was(problem: Exception) -> None:
    arrived = Failed.of(problem).raised()
    assert (type(arrived), str(arrived)) == (type(problem), str(problem))


class FakeRouter:
    """Has sessions and load to tell of."""

    def __init__(self) -> None:
        self.loads: tuple[SiblingLoad, ...] = ()
        self.bound: tuple[Placement, ...] = ()

    def booked_load(self) -> tuple[SiblingLoad, ...]:
        return self.loads

    def placements(self) -> tuple[Placement, ...]:
        return self.bound


class Lines:
    """A hub with links to it, and what each link's router heard."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "hub"
        self.words: list[tuple[int, Kind]] = []
        self.hub = Hub(lambda process, kind, payload: self.words.append((process, kind)))
        self.links: dict[int, Link] = {}
        self.routers: dict[int, FakeRouter] = {}
        self.heard: dict[int, list[Event]] = {}

    async def __aenter__(self) -> Lines:
        await self.hub.listen(self._path)
        return self

    async def __aexit__(self, *_: object) -> None:
        for link in self.links.values():
            await link.hang_up()
        await self.hub.close(5.0)

    async def join(self, process: int) -> Link:
        link = self.links[process] = await connect(self._path, process)
        self.routers[process] = FakeRouter()
        self.heard[process] = []
        router: Any = self.routers[process]
        await until(lambda: process in self.hub.processes)
        link.attach(router, self.heard[process].append)
        return link


def placed(session_id: str) -> Placement:
    return Placement(SessionKey(session_id), "a", 0, 1.5)


async def test_bindings_reach_all_siblings_and_not_their_sender(tmp_path: Path) -> None:
    async with Lines(tmp_path) as lines:
        for process in range(3):
            await lines.join(process)
        for session_id in ("s", "t"):
            lines.links[0].share(ShareSession(placed(session_id)))
        expected = [SessionPlaced(placed("s")), SessionPlaced(placed("t"))]
        for process in (1, 2):
            heard = lines.heard[process]
            await until(lambda heard=heard: [each for each in heard if isinstance(each, SessionPlaced)] == expected)
        assert not any(isinstance(each, SessionPlaced) for each in lines.heard[0])


async def test_load_is_told_when_it_changes_and_taken_back_when_its_process_goes(tmp_path: Path) -> None:
    load = SiblingLoad("a", 0, 1, 1, 50, 0, 0)
    async with Lines(tmp_path) as lines:
        leaving = await lines.join(0)
        await lines.join(1)
        lines.routers[0].loads = (load,)
        await until(lambda: SiblingReported(0, (load,)) in lines.heard[1])
        await leaving.hang_up()
        await until(lambda: lines.heard[1][-1] == SiblingReported(0, ()))


async def test_a_newcomer_is_told_of_all_sessions(tmp_path: Path) -> None:
    async with Lines(tmp_path) as lines:
        await lines.join(0)
        lines.routers[0].bound = tuple(placed(str(number)) for number in range(2500))
        await lines.join(1)
        await until(lambda: len([e for e in lines.heard[1] if isinstance(e, SessionPlaced)]) == 2500)


class Written:
    """A receipt file that can be full."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.full = False

    def put(self, line: bytes) -> bool:
        if not self.full:
            self.lines.append(line)
        return not self.full

    def flush(self) -> None: ...

    def close(self) -> None: ...


async def test_receipts_of_all_processes_come_whole_and_none_is_lost_at_the_end(tmp_path: Path) -> None:
    written = Written()
    async with Lines(tmp_path) as lines:
        lines.hub.receipts = written
        for process in range(2):
            link = await lines.join(process)
            for number in range(500):
                assert link.put(b'{"n":%d}\n' % (process * 1000 + number))
            link.close()
    assert len(written.lines) == 1000 and all(line.endswith(b"}\n") for line in written.lines)


async def test_receipts_that_the_disk_does_not_take_are_counted(tmp_path: Path) -> None:
    written = Written()
    written.full = True
    async with Lines(tmp_path) as lines:
        lines.hub.receipts = written
        link = await lines.join(0)
        link.put(b"{}\n")
        link.flush()
        await until(lambda: lines.hub.receipts_dropped == 1)


async def test_orders_and_last_words_arrive(tmp_path: Path) -> None:
    async with Lines(tmp_path) as lines:
        link = await lines.join(4)
        link.say(Kind.READY)
        await until(lambda: lines.words == [(4, Kind.READY)])
        lines.hub.say(Kind.DRAIN)
        await asyncio.wait_for(link.drain_asked.wait(), 5)
        assert not link.cut_asked.is_set()
        lines.hub.say(Kind.CUT, process=4)
        await asyncio.wait_for(link.cut_asked.wait(), 5)
        assert decode_number(encode(7)) == 7


async def test_a_process_that_loses_its_group_drains(tmp_path: Path) -> None:
    async with Lines(tmp_path) as lines:
        link = await lines.join(0)
        await lines.hub.close(0.01)
        await asyncio.wait_for(link.drain_asked.wait(), 5)
        assert link.put(b"{}\n") is False
