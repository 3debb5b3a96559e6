"""`kvrelay agent` as a process beside a mock worker, and its refusals."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
import zmq

from kvrelay.edge.agent import wire
from kvrelay.edge.worker.launch import MockFleet
from kvrelay.edge.worker.spec import MockSpec

COMMAND = [sys.executable, "-m", "kvrelay.cli.main", "agent"]


def test_it_says_where_it_publishes_and_what_it_publishes_there_is_a_heartbeat() -> None:
    with MockFleet([MockSpec(name="a")]) as mocks, zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        command = [*COMMAND, "--worker", mocks.workers[0].url + "/v1", "--json", "--interval-s", "0.1"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            assert ready["worker"] == mocks.workers[0].url and ready["pid"] == process.pid
            subscriber.setsockopt(zmq.SUBSCRIBE, wire.TOPIC)
            subscriber.connect(ready["agent"])
            beat = None
            while beat is None or not beat.ranks or not beat.ranks[0].whole:
                assert subscriber.poll(20_000)
                beat = wire.decode(subscriber.recv_multipart()[1])
                assert isinstance(beat, wire.Heartbeat)
            assert beat.incarnation == mocks.workers[0].incarnation and beat.worker_up
            assert (beat.ranks[0].last_seq, beat.ranks[0].blocks, beat.ranks[0].digest) == (-1, 0, 0)
            assert beat.snapshot_endpoint == ready["snapshots"]
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=20)
            assert process.returncode == 0
            assert f'tell the gateway with `agent = "{ready["agent"]}"`' in said
        finally:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--worker", "ftp://x"],
            "error: `--worker` is `ftp://x` (from the command line)\n  legal: ",
        ),
        (
            ["--worker", "http://127.0.0.1:1", "--listen", "tcp://0.0.0.0:5600"],
            "error: `--listen` is `tcp://0.0.0.0:5600` (from the command line)\n"
            "  legal: a loopback address such as tcp://127.0.0.1:5600; anything else needs `--insecure`\n",
        ),
        (
            ["--worker", "http://127.0.0.1:1", "--events", "udp://x"],
            "error: `--events` is `udp://x` (from the command line)\n  legal: `auto`, `none`, tcp://HOST:PORT",
        ),
        (
            ["--worker", "http://127.0.0.1:1", "--listen", "ipc:///nonexistent/folder/agent"],
            "error: cannot listen on or connect to one of ipc:///nonexistent/folder/agent, auto: ",
        ),
        (
            ["--worker", "http://127.0.0.1:1", "--api-key-file", "/nonexistent/key"],
            "error: cannot use `--api-key-file`\n  /nonexistent/key: No such file or directory\n",
        ),
    ],
)
def test_wrong_input_is_refused_with_what_would_be_right(arguments: list[str], message: str) -> None:
    ended = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.startswith(message), ended.stderr
