"""Workers as processes: own PIDs, own lives, loopback only, nothing left behind."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvrelay.edge.worker.launch import MockFleet, RunningWorker, WorkerStartError
from kvrelay.edge.worker.spec import MockSpec, spec_problems
from tests.edge.worker.conftest import Client


def listening_addresses(pid: int) -> set[str]:
    """Local addresses (hex, as the kernel prints them) of all TCP listeners of a process."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        target = os.readlink(descriptor)
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                addresses.add(fields[1].partition(":")[0])
    return addresses


def gone(pid: int, within_s: float) -> bool:
    """True when the process ended, or is a zombie that its new parent has yet to reap."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.covers("MK-04", "MK-05")
def test_four_workers_are_four_processes_and_one_can_be_killed_and_started_again() -> None:
    with MockFleet([MockSpec(name=f"w{i}") for i in range(4)]) as fleet:
        assert len({worker.pid for worker in fleet.workers}) == 4
        assert len({worker.incarnation for worker in fleet.workers}) == 4
        old = fleet.worker("w1")
        fleet.kill("w1")
        for worker in fleet.workers:
            if worker is not old:
                assert Client(worker.url).complete(prompt="x", max_tokens=1).status == 200
        with pytest.raises(ConnectionRefusedError):
            Client(old.url).get("/health")
        new = fleet.restart("w1")
        assert (new.url, new.events, new.replay) == (old.url, old.events, old.replay)
        assert new.pid != old.pid and new.incarnation != old.incarnation
        assert Client(new.url).state()["next_seq"] == 0
        assert Client(new.url).complete(prompt="x", max_tokens=1).status == 200
        pids = [worker.pid for worker in fleet.workers]
    assert all(gone(pid, 1.0) for pid in pids)


@pytest.mark.covers("MK-10", "MK-11")
def test_every_listener_is_on_loopback(shared_worker: RunningWorker) -> None:
    assert listening_addresses(shared_worker.pid) == {"0100007F"}
    assert shared_worker.url.startswith("http://127.0.0.1:")
    assert shared_worker.events is not None and shared_worker.events.startswith("tcp://127.0.0.1:")
    assert shared_worker.replay is not None and shared_worker.replay.startswith("tcp://127.0.0.1:")


@pytest.mark.covers("MK-10", "MK-11")
@pytest.mark.parametrize(
    ("spec", "member"),
    [
        (MockSpec(host="0.0.0.0"), "host"),
        (MockSpec(events="tcp://*:5557"), "events"),
        (MockSpec(events="tcp://0.0.0.0:5557"), "events"),
        (MockSpec(replay="tcp://*:5557"), "replay"),
        (MockSpec(events="auto", events_mode="connect"), "events"),
        (MockSpec(events="nonsense"), "events"),
        (MockSpec(events_mode="both"), "events_mode"),
        (MockSpec(blocks=10, max_model_len=161), "max_model_len"),
        (MockSpec(decode_ms=-1), "decode_ms"),
    ],
)
def test_an_illegal_spec_names_its_member(spec: MockSpec, member: str) -> None:
    assert [problem.member for problem in spec_problems(spec)] == [member]


def test_beyond_loopback_only_when_told_so() -> None:
    assert spec_problems(MockSpec(host="0.0.0.0", events="tcp://*:5557", insecure=True)) == ()
    assert spec_problems(MockSpec(events="tcp://127.0.0.1:5557")) == ()
    assert spec_problems(MockSpec(events="tcp://10.0.0.1:5557", events_mode="connect")) == ()


def test_numbered_specs_count_names_ports_and_endpoints_up() -> None:
    spec = MockSpec(name="m", port=8100, events="tcp://127.0.0.1:5557", replay="ipc:///tmp/r")
    second = spec.numbered(1)
    assert (second.name, second.port, second.events, second.replay) == (
        "m-1",
        8101,
        "tcp://127.0.0.1:5558",
        "ipc:///tmp/r-1",
    )
    assert MockSpec(events="tcp://h:1", events_mode="connect").numbered(3).events == "tcp://h:1"


def test_a_worker_that_cannot_start_is_an_error_and_leaves_nothing(
    capfd: pytest.CaptureFixture[str], shared_worker: RunningWorker
) -> None:
    taken = int(shared_worker.url.rpartition(":")[2])
    fleet = MockFleet([MockSpec(name="fine"), MockSpec(name="late", port=taken)])
    with pytest.raises(WorkerStartError, match=r"worker `late` \(pid \d+\) ended with status 2 before it was ready"):
        fleet.start()
    assert fleet.workers == []
    assert "cannot start" in capfd.readouterr().err


def test_a_worker_starts_within_half_a_cpu_second(shared_worker: RunningWorker) -> None:
    with MockFleet([MockSpec()]) as fleet:
        fields = Path(f"/proc/{fleet.workers[0].pid}/stat").read_text().rpartition(")")[2].split()
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    assert cpu_s < 1.5, "0.3 s on an idle machine; the bound allows for a noisy one"


def test_a_worker_imports_nothing_heavy() -> None:
    script = "import sys, kvrelay.edge.worker.process; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout.decode().split()
    assert {"aiohttp", "pydantic", "typer", "rich", "prometheus_client"}.isdisjoint(loaded)


async def test_a_fleet_is_an_async_context_too() -> None:
    async with MockFleet([MockSpec()]) as fleet:
        pid = fleet.workers[0].pid
        assert fleet.workers[0].alive
    assert gone(pid, 1.0)


@pytest.mark.covers("MK-04")
def test_sigterm_drains_the_running_request_refuses_new_ones_and_exits_0(
    start: Callable[..., RunningWorker],
) -> None:
    worker = start(decode_ms=20.0, drain_s=10.0)
    client = Client(worker.url)
    answers: list[int] = []
    running = threading.Thread(
        target=lambda: answers.append(len(client.complete(prompt="x", max_tokens=40).json()["choices"][0]["text"]))
    )
    running.start()
    while client.state()["running"] == 0:
        time.sleep(0.01)
    worker.signal(signal.SIGTERM)
    while not client.state()["draining"]:
        time.sleep(0.01)
    assert client.get("/health").status == 503
    refused = client.complete(prompt="y", max_tokens=1)
    assert refused.status == 503 and "draining" in refused.json()["error"]["message"]
    running.join()
    assert answers == [40]
    assert worker.wait(5.0) == 0


def test_a_drain_is_bounded(start: Callable[..., RunningWorker]) -> None:
    worker = start(decode_ms=20.0, drain_s=0.2)
    client = Client(worker.url)
    broken: list[Exception] = []

    def run() -> None:
        try:
            client.complete(prompt="x", max_tokens=4000)
        except (http.client.HTTPException, ConnectionError) as error:
            broken.append(error)

    running = threading.Thread(target=run)
    running.start()
    while client.state()["running"] == 0:
        time.sleep(0.01)
    worker.signal(signal.SIGTERM)
    assert worker.wait(5.0) == 0
    running.join()
    assert len(broken) == 1, "the client sees a broken answer, not a hang"


def test_workers_end_when_their_parent_is_killed() -> None:
    script = (
        "import sys, time\n"
        "from kvrelay.edge.worker.launch import MockFleet\n"
        "from kvrelay.edge.worker.spec import MockSpec\n"
        "fleet = MockFleet([MockSpec(name='a'), MockSpec(name='b')])\n"
        "fleet.start()\n"
        "print(*(worker.pid for worker in fleet.workers), flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    parent.kill()
    parent.communicate()
    assert len(pids) == 2 and all(gone(pid, 5.0) for pid in pids)


def test_the_spec_and_the_ready_line_are_json() -> None:
    spec = MockSpec(name="x", faults=({"kind": "delay", "ms": 3},))
    assert msgspec.json.decode(msgspec.json.encode(spec), type=MockSpec) == spec
