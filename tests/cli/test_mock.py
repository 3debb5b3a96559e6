"""`kvrelay mock` as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

COMMAND = (sys.executable, "-m", "kvrelay.cli.main", "mock")


class Run:
    """One run of the command with its ready lines."""

    def __init__(self, *options: str, workers: int) -> None:
        self.process = subprocess.Popen(
            (*COMMAND, "--port", "0", "--workers", str(workers), "--json", *options),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.ready: list[dict[str, Any]] = [json.loads(self.process.stdout.readline()) for _ in range(workers)]

    def read_ready(self) -> dict[str, Any]:
        """One more ready line, of a worker that was started again."""
        assert self.process.stdout is not None
        ready: dict[str, Any] = json.loads(self.process.stdout.readline())
        return ready

    def end(self, number: int) -> tuple[int, str]:
        """Exit status and what it said on stderr."""
        self.process.send_signal(number)
        _, talk = self.process.communicate(timeout=20)
        return self.process.returncode, talk.decode()


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    runs: list[Run] = []
    yield runs
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
        run.process.communicate()


def serves(url: str) -> bool:
    request = urllib.request.Request(
        url + "/v1/completions", b'{"prompt": "x", "max_tokens": 1}', {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.covers("MK-04", "MK-05")
def test_four_workers_killing_one_leaves_three_serving_and_the_end_leaves_nothing(runs: list[Run]) -> None:
    run = Run(workers=4)
    runs.append(run)
    pids = [ready["pid"] for ready in run.ready]
    assert len(set(pids)) == len({ready["incarnation"] for ready in run.ready}) == 4
    assert all({"name", "url", "events", "replay", "pid", "incarnation"} <= set(ready) for ready in run.ready)
    assert [ready["name"] for ready in run.ready] == [f"mock-{i}" for i in range(4)]
    os.kill(pids[0], signal.SIGKILL)
    assert [serves(ready["url"]) for ready in run.ready] == [False, True, True, True]
    status, talk = run.end(signal.SIGTERM)
    assert status == 0
    assert talk == f"warning: worker `mock-0` (pid {pids[0]}) was killed by signal 9; the others go on\n"
    assert not any(exists(pid) for pid in pids)
    assert not any(serves(ready["url"]) for ready in run.ready)


@pytest.mark.covers("MK-05")
def test_restart_gives_a_new_life_on_the_same_address(runs: list[Run]) -> None:
    run = Run("--restart", workers=1)
    runs.append(run)
    os.kill(run.ready[0]["pid"], signal.SIGKILL)
    again = run.read_ready()
    assert again["url"] == run.ready[0]["url"] and again["events"] == run.ready[0]["events"]
    assert again["pid"] != run.ready[0]["pid"] and again["incarnation"] != run.ready[0]["incarnation"]
    assert serves(again["url"])
    assert run.end(signal.SIGINT)[0] == 0
    assert not exists(again["pid"])


def test_ctrl_c_in_a_terminal_lets_running_requests_end(runs: list[Run]) -> None:
    """A terminal signals every process of the group, not only the command."""
    run = Run("--decode-ms", "20", workers=1)
    runs.append(run)
    answers: list[dict[str, Any]] = []

    def ask() -> None:
        body = b'{"prompt": [1, 2, 3], "max_tokens": 60}'
        request = urllib.request.Request(
            run.ready[0]["url"] + "/v1/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=20) as response:
            answers.append(json.load(response))

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.4)
    os.killpg(run.process.pid, signal.SIGINT)
    asking.join(20)
    _, talk = run.process.communicate(timeout=20)
    assert (run.process.returncode, talk) == (0, b"")
    assert answers[0]["usage"]["completion_tokens"] == 60


def test_when_every_worker_has_ended_the_command_ends_with_1(runs: list[Run]) -> None:
    run = Run(workers=1)
    runs.append(run)
    os.kill(run.ready[0]["pid"], signal.SIGKILL)
    _, talk = run.process.communicate(timeout=20)
    assert run.process.returncode == 1
    assert talk.decode().endswith(
        "error: every mock worker has ended, nothing is left to run\nhint: `--restart` starts them again\n"
    )


def test_a_killed_command_takes_its_workers_along(runs: list[Run]) -> None:
    run = Run(workers=2)
    runs.append(run)
    run.end(signal.SIGKILL)
    deadline = time.monotonic() + 5.0
    while any(serves(ready["url"]) for ready in run.ready) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(serves(ready["url"]) for ready in run.ready)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--host", "0.0.0.0"),
            "error: `--host` is `0.0.0.0` (from the command line)\n"
            "  legal: a loopback address; anything else needs `--insecure`\n",
        ),
        (
            ("--block-size", "0"),
            "error: `--block-size` is `0` (from the command line)\n  legal: 1 to 4096\n",
        ),
        (
            ("--workers", "0"),
            "error: `--workers` is `0` (from the command line)\n  legal: 1 to 64\n",
        ),
        (
            ("--port", "65534", "--workers", "3"),
            "error: `--port` is `65534` (from the command line)\n"
            "  legal: 0 to 65533, because the ports of 3 workers follow one another\n",
        ),
        (
            ("--fault", "x"),
            "error: `--fault` is `x` (from the command line)\n"
            '  not JSON: Expecting value: line 1 column 1 (char 0); legal: {"kind": "delay", "ms": 200}\n',
        ),
        (
            ("--fault", '{"kind": "dlay"}'),
            'error: `--fault` is `{"kind": "dlay"}` (from the command line)\n'
            "  unknown fault kind `dlay`; known: delay, refuse, 429, 503, 500, hang, die_after_chunks, garbage, "
            "stop_publishing, drop_event, corrupt_block; did you mean `delay`?\n",
        ),
    ],
)
def test_bad_options_say_what_is_legal(options: tuple[str, ...], message: str) -> None:
    done = subprocess.run((*COMMAND, *options), capture_output=True, timeout=20, check=False)
    assert (done.returncode, done.stdout, done.stderr.decode()) == (2, b"", message)


def test_help_has_an_example() -> None:
    done = subprocess.run((*COMMAND, "--help"), capture_output=True, timeout=20, check=True)
    assert b"kvrelay mock --workers 4 --port 0 --json" in done.stdout
