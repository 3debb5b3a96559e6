"""The fleet against scripted workers: what is fed to the router, and in which order."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from kvrelay.core.model.effects import RequestReplay
from kvrelay.core.model.events import (
    Event,
    EventsHeard,
    KvBatch,
    LoadReported,
    ProbeAnswered,
    ReplayArrived,
    ReplayUnavailable,
    ResidencyReset,
    WorkerDrained,
    WorkerJoined,
    WorkerLeft,
    WorkerResumed,
)
from kvrelay.core.model.ids import WorkerId
from kvrelay.core.routing.router import Router
from kvrelay.core.routing.settings import RouterSettings
from kvrelay.edge.connectors.base import WorkerAnswerUnusable, WorkerUnreachable
from kvrelay.edge.fleet.static import Fleet, UnknownWorker, WorkerExists
from kvrelay.edge.observe.metrics import Metrics
from kvrelay.edge.system.config import Config, WorkerConfig, load_config
from tests.edge.fleet.scripted import ScriptedWorker, payload, stored

E = TypeVar("E")


class Running:
    def __init__(self, fleet: Fleet, fed: list[Event], metrics: Metrics) -> None:
        self.fleet = fleet
        self.fed = fed
        self.metrics = metrics

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.fed if isinstance(event, kind)]

    async def until(self, condition: Callable[[], object], *, within_s: float = 10.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, self.fed
            await asyncio.sleep(0.005)

    async def subscribed(self, worker: ScriptedWorker) -> None:
        """Messages sent before the subscription arrived are lost by design: send until one comes through."""
        seq = 0
        while not self.of(KvBatch):
            await worker.publish(seq, payload())
            seq += 1
            await asyncio.sleep(0.02)


def settings(*workers: WorkerConfig, interval_s: float) -> Config:
    config = load_config(env={"KVRELAY_HEALTH__INTERVAL_S": str(interval_s), "KVRELAY_HEALTH__TIMEOUT_S": "5"})
    return config.model_copy(update={"workers": workers})


@asynccontextmanager
async def running(*workers: WorkerConfig, interval_s: float = 0.05) -> AsyncIterator[Running]:
    fed: list[Event] = []
    metrics = Metrics()
    fleet = Fleet(settings(*workers, interval_s=interval_s), feed=fed.append, clock=time.monotonic, observer=metrics)
    await fleet.start()
    try:
        yield Running(fleet, fed, metrics)
    finally:
        await fleet.stop()
    assert [task for task in asyncio.all_tasks() if "WorkerWatch" in repr(task.get_coro())] == []


async def test_a_worker_joins_with_what_it_said_of_itself_and_is_then_probed() -> None:
    async with ScriptedWorker() as worker, running(WorkerConfig(url=worker.url, name="a")) as run:
        await run.until(lambda: run.of(ProbeAnswered))
        joined = run.fed[0]
        assert isinstance(joined, WorkerJoined)
        assert joined.worker == WorkerId("a", f"{worker.start_s:.2f}")
        assert (joined.spec.models, joined.spec.block_size_tokens, joined.spec.sends_events) == (("m",), 4, True)
        assert run.of(ProbeAnswered)[0] == ProbeAnswered(joined.worker, True)
        assert run.fleet.upstream("a").url == worker.url


async def test_a_worker_may_come_later_than_the_gateway() -> None:
    async with ScriptedWorker() as worker:
        await worker.stop_listening()
        async with running(WorkerConfig(url=worker.url, name="a")) as run:
            await run.until(lambda: "refused" in run.fleet.view("a").last_probe_detail)
            assert run.fed == []
            await worker.listen()
            await run.until(lambda: run.of(WorkerJoined))


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What the watch logs, whatever another test did to the loggers above it."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logger = logging.getLogger("kvrelay.edge.fleet.watch")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


async def test_a_worker_that_does_not_answer_is_named_once_and_introduced_when_it_comes(said: list[str]) -> None:
    async with ScriptedWorker() as worker:
        await worker.stop_listening()
        async with running(WorkerConfig(url=worker.url, name="a")) as run:
            await run.until(lambda: said)
            await asyncio.sleep(0.2)
            assert said == [
                f"WARNING worker_silent worker=a url={worker.url}: connection refused; asked again every 0.05 s"
            ]
            await worker.listen()
            await run.until(lambda: run.of(WorkerJoined))
            assert said[1] == (
                f"INFO worker_described worker=a engine=vllm version=0.32.0 events=tcp://127.0.0.1:{worker.events_port}"
            )


@pytest.mark.covers("MK-03")
async def test_a_worker_without_events_is_said_to_be_guessed_about(said: list[str]) -> None:
    async with ScriptedWorker(events=False) as worker, running(WorkerConfig(url=worker.url, name="a")) as run:
        await run.until(lambda: run.of(WorkerJoined))
        assert said == [
            "WARNING worker_without_events worker=a engine=vllm version=0.32.0:"
            " what it holds is guessed from what it was sent"
        ]


@pytest.mark.covers("MK-03")
async def test_events_that_never_come_are_noticed_by_what_the_engine_computed(said: list[str]) -> None:
    config = {"name": "a", "topic": "nobody-publishes-this", "replay": "none"}
    async with ScriptedWorker() as worker:
        worker.metrics_lines = ["vllm:prefix_cache_queries_total 10", "vllm:prefix_cache_hits_total 0"]
        async with running(WorkerConfig(url=worker.url, **config)) as run:
            await run.until(lambda: run.fleet.view("a").last_scrape)
            worker.metrics_lines = ["vllm:prefix_cache_queries_total 9010", "vllm:prefix_cache_hits_total 500"]
            await run.until(lambda: run.fleet.view("a").events_problem)
            await worker.publish(0, payload())
            await asyncio.sleep(0.2)
            problem = "it computed 8500 prompt tokens and not one event of it came; are `events` and `topic` right?"
            assert run.fleet.view("a").events_problem == problem
            assert said[1:] == [f"WARNING events_silent worker=a: {problem}"]


@pytest.mark.covers("S23")
async def test_a_little_computed_in_silence_is_enough_where_a_replay_says_why() -> None:
    async with ScriptedWorker() as worker:
        worker.metrics_lines = ["vllm:prefix_cache_queries_total 10", "vllm:prefix_cache_hits_total 0"]
        async with running(WorkerConfig(url=worker.url, name="a", topic="kv@b")) as run:
            await run.until(lambda: run.fleet.view("a").last_scrape)
            await worker.publish(0, payload())
            worker.metrics_lines[0] = "vllm:prefix_cache_queries_total 74"
            await run.until(lambda: run.of(EventsHeard))
            problem = "its events have topic `kv@a@m`, subscribed is `kv@b`"
            assert run.of(EventsHeard)[0].problem == run.fleet.view("a").events_problem == problem


async def test_batches_carry_the_incarnation_and_are_counted() -> None:
    async with ScriptedWorker() as worker, running(WorkerConfig(url=worker.url, name="a")) as run:
        await run.until(lambda: run.of(WorkerJoined))
        await run.subscribed(worker)
        seq = len(worker.buffer)
        await worker.publish(seq, payload(stored([1, 2], list(range(8)))))
        await run.until(lambda: any(batch.seq == seq for batch in run.of(KvBatch)))
        batch = run.of(KvBatch)[-1]
        assert batch.worker == run.of(WorkerJoined)[0].worker
        assert batch.events[0].hashes == (1, 2)
        assert b'kvrelay_events_total{kind="stored",worker="a"} 1.0' in run.metrics.render()


async def test_another_topic_is_not_subscribed_to() -> None:
    async with ScriptedWorker() as worker, running(WorkerConfig(url=worker.url, name="a", topic="kv@b")) as run:
        await run.until(lambda: run.of(WorkerJoined))
        for seq in range(5):
            await worker.publish(seq, payload(), topic=b"kv@a@m")
            await asyncio.sleep(0.02)
        assert run.of(KvBatch) == []
        run.fleet.replay(RequestReplay(run.of(WorkerJoined)[0].worker, 0, 0))
        await run.until(lambda: run.of(ReplayUnavailable))
        assert run.of(ReplayUnavailable)[0].detail == "its events have topic `kv@a@m`, subscribed is `kv@b`"


@pytest.mark.covers("RT-22", "S03")
async def test_a_restarted_worker_joins_anew_before_any_event_of_the_new_process() -> None:
    """The sequence begins again: the batch waits until the new process has said who it is."""
    async with ScriptedWorker() as worker, running(WorkerConfig(url=worker.url, name="a")) as run:
        await run.until(lambda: run.of(WorkerJoined))
        await run.subscribed(worker)
        worker.become_new_process()
        await worker.publish(0, payload(stored([7], [1, 2, 3, 4])))
        await run.until(lambda: any(batch.events for batch in run.of(KvBatch)))
        new = WorkerId("a", f"{worker.start_s:.2f}")
        first_new = next(event for event in run.fed if getattr(event, "worker", None) == new)
        assert isinstance(first_new, WorkerJoined)
        assert [batch.worker for batch in run.of(KvBatch) if batch.events] == [new]


@pytest.mark.covers("RT-22")
async def test_a_burst_held_over_a_restart_is_fed_in_order_and_in_parts() -> None:
    async with ScriptedWorker() as worker, running(WorkerConfig(url=worker.url, name="a")) as run:
        await run.until(lambda: run.of(WorkerJoined))
        await run.subscribed(worker)
        run.fed.clear()
        worker.become_new_process()
        for seq in range(200):
            await worker.publish(seq, payload(stored([seq + 1], [1, 2, 3, 4])))
        new = WorkerId("a", f"{worker.start_s:.2f}")
        await run.until(lambda: {batch.seq for batch in run.of(KvBatch) if batch.worker == new} == set(range(200)))
        live = [batch.seq for batch in run.of(KvBatch) if batch.events]
        assert live == sorted(live)
        assert {batch.worker for batch in run.of(KvBatch) if batch.events} == {new}


async def test_a_new_start_time_is_a_new_incarnation_without_any_event() -> None:
    async with ScriptedWorker() as worker, running(WorkerConfig(url=worker.url, name="a")) as run:
        await run.until(lambda: run.fleet.view("a").last_scrape)
        worker.become_new_process()
        await run.until(lambda: len(run.of(WorkerJoined)) == 2)
        assert [joined.worker.incarnation for joined in run.of(WorkerJoined)][1] == f"{worker.start_s:.2f}"


async def test_refused_and_back_is_a_new_life_of_a_worker_without_start_time() -> None:
    async with (
        ScriptedWorker(events=False, start_time=False) as worker,
        running(WorkerConfig(url=worker.url, name="a", adapter="openai")) as run,
    ):
        await run.until(lambda: run.of(ProbeAnswered))
        await worker.stop_listening()
        await run.until(lambda: any(not probe.ok for probe in run.of(ProbeAnswered)))
        await worker.listen()
        await run.until(lambda: len(run.of(WorkerJoined)) == 2)
        assert [joined.worker.incarnation for joined in run.of(WorkerJoined)] == ["life-1", "life-2"]
        assert not run.of(WorkerJoined)[0].spec.sends_events


async def test_repeated_batches_of_a_living_process_are_passed_on_as_they_are() -> None:
    async with ScriptedWorker() as worker, running(WorkerConfig(url=worker.url, name="a")) as run:
        await run.until(lambda: run.of(WorkerJoined))
        await run.subscribed(worker)
        for _ in range(2):
            await worker.publish(50, payload(stored([7], [1, 2, 3, 4])))
        await run.until(lambda: len([batch for batch in run.of(KvBatch) if batch.seq == 50]) == 2)
        assert len(run.of(WorkerJoined)) == 1


@pytest.mark.covers("RT-22")
async def test_an_engine_started_again_behind_a_living_server_is_a_new_incarnation() -> None:
    """The server still names its own start; the number is old and the time is new."""
    async with ScriptedWorker() as worker, running(WorkerConfig(url=worker.url, name="a"), interval_s=60) as run:
        await run.until(lambda: run.of(WorkerJoined))
        await run.subscribed(worker)
        for seq in (50, 51, 52):
            await worker.publish(seq, payload(stored([seq], [1, 2, 3, 4]), published_s=100.0 + seq))
        await run.until(lambda: any(batch.seq == 52 for batch in run.of(KvBatch)))
        for again in (1, 2):
            worker.buffer.clear()
            for seq in (0, 1):
                await worker.publish(seq, payload(stored([seq], [5, 6, 7, 8]), published_s=200.0 * again + seq))
            new = WorkerId("a", f"{worker.start_s:.2f}+{again}")
            await run.until(lambda: {b.seq for b in run.of(KvBatch) if b.worker == new} == {0, 1})  # noqa: B023
        assert [joined.worker.incarnation for joined in run.of(WorkerJoined)] == [
            f"{worker.start_s:.2f}",
            f"{worker.start_s:.2f}+1",
            f"{worker.start_s:.2f}+2",
        ]


async def test_repeated_and_late_batches_are_no_new_stream() -> None:
    async with ScriptedWorker() as worker, running(WorkerConfig(url=worker.url, name="a"), interval_s=60) as run:
        await run.until(lambda: run.of(WorkerJoined))
        await run.subscribed(worker)
        for seq in (50, 52, 51, 50, 53):
            await worker.publish(seq, payload(stored([seq], [1, 2, 3, 4]), published_s=100.0 + seq))
        await run.until(lambda: any(batch.seq == 53 for batch in run.of(KvBatch)))
        assert len(run.of(WorkerJoined)) == 1


async def test_a_new_process_takes_the_count_of_streams_back() -> None:
    async with ScriptedWorker() as worker, running(WorkerConfig(url=worker.url, name="a")) as run:
        await run.until(lambda: run.of(WorkerJoined))
        await run.subscribed(worker)
        await worker.publish(60, payload(stored([1], [1, 2, 3, 4]), published_s=100.0))
        await run.until(lambda: any(batch.seq == 60 for batch in run.of(KvBatch)))
        worker.buffer.clear()
        await worker.publish(0, payload(stored([1], [1, 2, 3, 4]), published_s=200.0))
        await run.until(lambda: len(run.of(WorkerJoined)) == 2)
        worker.become_new_process()
        await run.until(lambda: len(run.of(WorkerJoined)) == 3)
        assert run.of(WorkerJoined)[2].worker.incarnation == f"{worker.start_s:.2f}"


async def test_malformed_messages_are_counted_and_the_next_good_one_is_used() -> None:
    async with ScriptedWorker() as worker, running(WorkerConfig(url=worker.url, name="a")) as run:
        await run.until(lambda: run.of(WorkerJoined))
        await run.subscribed(worker)
        await worker.publish_raw([b"kv@a", b"short", b"x"])
        await worker.publish_raw([b"kv@a", (90).to_bytes(8, "big")])
        await worker.publish_raw([b"kv@a", (91).to_bytes(8, "big"), b"\xc1garbage"])
        await worker.publish(92, payload(stored([1], [1, 2, 3, 4])))
        await run.until(lambda: any(batch.seq == 92 for batch in run.of(KvBatch)))
        assert run.fleet.view("a").malformed_messages == 3
        assert b'kvrelay_events_malformed_total{worker="a"} 3.0' in run.metrics.render()


@pytest.mark.covers("S12")
async def test_events_of_another_cache_group_are_counted_by_kind_and_the_normal_ones_between_are_indexed() -> None:
    """Hashes and tokens of the odd ones do not fit together, since a window's blocks are announced without the rest."""
    router = Router(RouterSettings(key_seed=b"k"))
    async with ScriptedWorker() as worker, running(WorkerConfig(url=worker.url, name="a")) as run:
        await run.until(lambda: run.of(WorkerJoined))
        await run.subscribed(worker)
        odd = {**stored([70, 71, 72], [9]), "group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
        for seq in range(40, 46):
            normal = stored([seq], [seq, 2, 3, 4])
            await worker.publish(seq, payload(odd, normal) if seq % 2 else payload(normal))
        await run.until(lambda: any(batch.seq == 45 for batch in run.of(KvBatch)))
        assert (len(run.of(WorkerJoined)), run.fleet.view("a").malformed_messages) == (1, 0)
        assert b'kind="skipped_cache_group_sliding_window",worker="a"} 3.0' in run.metrics.render()
        batches = [batch for batch in run.of(KvBatch) if batch.seq >= 40]
        assert [batch.seq for batch in batches] == list(range(40, 46)), "every batch came, on one subscription"
        router.step(0.0, run.of(WorkerJoined)[0])
        router.step(0.0, ReplayArrived(batches[0].worker, 0, ()))
        for seq, batch in enumerate(batches):
            router.step(0.0, msgspec.structs.replace(batch, seq=seq))
        (status,) = router.status(0.0).workers
        assert (status.targets[0].index_blocks["gpu"], status.events["skipped"]) == (6, 3)


async def test_what_was_published_while_no_connection_stood_is_fetched_after_it_stands() -> None:
    """The last message was lost and nothing follows it: no gap will ever show."""
    async with ScriptedWorker() as worker, running(WorkerConfig(url=worker.url, name="a")) as run:
        worker.buffer = [(seq, payload(stored([seq + 1], [1, 2, 3, 4]))) for seq in range(3)]
        await run.until(lambda: len(run.of(KvBatch)) == 3)
        assert [batch.seq for batch in run.of(KvBatch)] == [0, 1, 2]
        assert run.of(KvBatch)[0].worker == run.of(WorkerJoined)[0].worker


async def test_replay_answers_with_what_the_worker_still_has() -> None:
    async with ScriptedWorker() as worker, running(WorkerConfig(url=worker.url, name="a")) as run:
        await run.until(lambda: run.of(WorkerJoined))
        id_ = run.of(WorkerJoined)[0].worker
        worker.buffer = [(seq, payload(stored([seq + 1], [1, 2, 3, 4]))) for seq in range(3, 6)]
        run.fleet.replay(RequestReplay(id_, 0, 0))
        await run.until(lambda: run.of(ReplayArrived))
        answer = run.of(ReplayArrived)[0]
        assert [(batch.seq, batch.worker) for batch in answer.batches] == [(3, id_), (4, id_), (5, id_)]


@pytest.mark.covers("RT-22")
async def test_a_gap_that_is_a_restart_is_not_replayed_under_the_old_name() -> None:
    """The new process has already published more than the old one ever did, and no probe has seen it yet."""
    async with ScriptedWorker() as worker, running(WorkerConfig(url=worker.url, name="a"), interval_s=60) as run:
        await run.until(lambda: run.of(WorkerJoined))
        old = run.of(WorkerJoined)[0].worker
        worker.become_new_process()
        worker.buffer = [(seq, payload(stored([seq + 1], [1, 2, 3, 4]))) for seq in range(10)]
        run.fleet.replay(RequestReplay(old, 0, 4))
        await run.until(lambda: run.of(ReplayUnavailable))
        assert run.of(ReplayUnavailable) == [ReplayUnavailable(old, 0, "another process took its place")]
        assert [joined.worker.incarnation for joined in run.of(WorkerJoined)][1:] == [f"{worker.start_s:.2f}"]


async def test_replay_without_an_end_marker_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.edge.fleet.event_feed.REPLAY_TIMEOUT_S", 0.1)
    async with ScriptedWorker() as worker, running(WorkerConfig(url=worker.url, name="a")) as run:
        await run.until(lambda: run.of(WorkerJoined))
        id_ = run.of(WorkerJoined)[0].worker
        worker.answer_replay = lambda from_seq: [[b"", b"t", (0).to_bytes(8, "big"), payload()]]
        run.fleet.replay(RequestReplay(id_, 0, 0))
        await run.until(lambda: run.of(ReplayUnavailable))
        assert run.of(ReplayUnavailable) == [ReplayUnavailable(id_, 0, "no complete answer within 0.1 s")]


async def test_replay_of_a_worker_without_endpoint_and_of_one_that_left() -> None:
    async with ScriptedWorker() as worker, running(WorkerConfig(url=worker.url, name="a", replay="none")) as run:
        await run.until(lambda: run.of(WorkerJoined))
        id_ = run.of(WorkerJoined)[0].worker
        run.fleet.replay(RequestReplay(id_, 0, 0))
        run.fleet.replay(RequestReplay(WorkerId("gone", "1"), 0, 0))
        await run.until(lambda: len(run.of(ReplayUnavailable)) == 2)
        assert {answer.detail for answer in run.of(ReplayUnavailable)} == {
            "the worker has no replay endpoint",
            "the worker left",
        }


async def test_load_is_reported_per_rank_and_missing_gauges_stay_unknown() -> None:
    async with ScriptedWorker() as worker:
        worker.metrics_lines = [
            'vllm:num_requests_running{engine="0",model_name="m"} 3.0',
            'vllm:num_requests_running{engine="1",model_name="m"} 4.0',
            'vllm:num_requests_waiting{engine="1",model_name="m"} 2.0',
        ]
        async with running(WorkerConfig(url=worker.url, name="a")) as run:
            await run.until(lambda: len(run.of(LoadReported)) >= 2)
            id_ = run.of(WorkerJoined)[0].worker
            assert run.of(LoadReported)[:2] == [
                LoadReported(id_, 0, running_requests=3),
                LoadReported(id_, 1, running_requests=4, waiting_requests=2),
            ]


@pytest.mark.covers("RT-21")
async def test_an_unhealthy_answer_and_a_refused_probe_are_failures() -> None:
    async with ScriptedWorker() as worker, running(WorkerConfig(url=worker.url, name="a")) as run:
        await run.until(lambda: run.of(ProbeAnswered))
        worker.health = 503
        await run.until(lambda: not run.of(ProbeAnswered)[-1].ok)
        assert run.of(ProbeAnswered)[-1].detail == "/health answered 503"
        await worker.stop_listening()
        await run.until(lambda: run.of(ProbeAnswered)[-1].detail == "connection refused")
        await worker.listen()


async def test_operator_actions_are_fed_and_unknown_names_are_refused() -> None:
    async with ScriptedWorker() as worker, running() as run:
        await run.fleet.add(WorkerConfig(url=worker.url, name="a"))
        with pytest.raises(WorkerExists):
            await run.fleet.add(WorkerConfig(url=worker.url, name="b"))
        await run.until(lambda: run.of(WorkerJoined))
        run.fed.clear()
        run.fleet.drain("a")
        run.fleet.resume("a")
        run.fleet.resync("a")
        await run.fleet.remove("a")
        operator = [event for event in run.fed if not isinstance(event, ProbeAnswered | LoadReported)]
        assert operator == [
            WorkerDrained("a"),
            WorkerResumed("a"),
            ResidencyReset("a", replay=True),
            WorkerLeft("a"),
        ]
        for act in (run.fleet.drain, run.fleet.resume, run.fleet.resync, run.fleet.view):
            with pytest.raises(UnknownWorker):
                act("a")


@pytest.mark.covers("S09")
async def test_a_reset_worker_is_forgotten_at_the_same_moment_and_a_refusing_one_is_not() -> None:
    async with ScriptedWorker() as worker, running(WorkerConfig(url=worker.url, name="a")) as run:
        await run.until(lambda: run.of(WorkerJoined))
        worker.in_use = True
        with pytest.raises(WorkerAnswerUnusable, match="blocks are in use"):
            await run.fleet.reset("a")
        assert not run.of(ResidencyReset)
        worker.in_use = False
        await run.fleet.reset("a")
        assert run.of(ResidencyReset) == [ResidencyReset("a")]
        with pytest.raises(UnknownWorker):
            await run.fleet.reset("b")


async def test_a_worker_that_never_answered_cannot_be_reset() -> None:
    async with running(WorkerConfig(url="http://127.0.0.1:1", name="a")) as run:
        with pytest.raises(WorkerUnreachable):
            await run.fleet.reset("a")


async def test_a_workers_key_goes_to_that_worker(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("s3cret\n")
    async with ScriptedWorker() as worker:
        async with running(WorkerConfig(url=worker.url, name="a", api_key_file=key_file)) as run:
            await run.until(lambda: run.of(ProbeAnswered))
        assert set(worker.authorization) == {"Bearer s3cret"}


async def test_the_tokenizer_of_the_worker_answers_with_an_array() -> None:
    async with ScriptedWorker() as worker, running(WorkerConfig(url=worker.url, name="a")) as run:
        await run.until(lambda: run.of(WorkerJoined))
        upstream = run.fleet.upstream("a")
        tokens = await upstream.connector.tokenize(run.fleet.session_of("a"), upstream.url, {"prompt": "abc"})
        assert tokens.dtype == "uint32"
        assert tokens.tolist() == [3, 70_000]


async def test_a_burst_of_events_leaves_the_loop_free() -> None:
    """20 MB of events at once: a callback due every 2 ms still runs between the turns of the reader."""
    async with ScriptedWorker() as worker, running(WorkerConfig(url=worker.url, name="a")) as run:
        await run.until(lambda: run.of(WorkerJoined))
        await run.subscribed(worker)
        block = payload(stored(list(range(64)), list(range(256))))
        turns_before = len(run.of(KvBatch))
        for seq in range(1000, 3000):
            await worker.publish_raw([b"kv@a", seq.to_bytes(8, "big"), block])
        ticks = 0
        deadline = time.monotonic() + 20
        while len(run.of(KvBatch)) < turns_before + 2000 and time.monotonic() < deadline:
            ticks += 1
            await asyncio.sleep(0.001)
        assert len(run.of(KvBatch)) == turns_before + 2000
        assert ticks >= 5
