"""`kvrelay chaos events` as a process: one JSON line per action, commands on standard input, and its refusals."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

COMMAND = [sys.executable, "-m", "kvrelay.cli.main", "chaos", "events"]


@pytest.fixture
def publisher() -> Iterator[tuple[zmq.Socket, str]]:
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        yield socket, f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"


def send(socket: zmq.Socket, *seqs: int) -> None:
    for seq in seqs:
        socket.send_multipart([b"kv@a", seq.to_bytes(8, "big"), b"x"])


def test_every_action_is_a_line_and_instructions_come_from_file_flags_and_input(
    publisher: tuple[zmq.Socket, str], tmp_path: Path
) -> None:
    socket, endpoint = publisher
    script = tmp_path / "script"
    script.write_text("drop 1  # from the file\n")
    command = [*COMMAND, "--events", endpoint, "--script", str(script), "--do", "hold 2 until release"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdin is not None and process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready["replay"] is None and ready["pid"] == process.pid
        assert ready["events"].startswith("tcp://127.0.0.1:")
        send(socket, 0, 1, 2, 3)
        lines = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.stdin.write("relaese\nrelease\n")
        process.stdin.flush()
        lines.append(json.loads(process.stdout.readline()))
        assert [(line["action"], line["seq"], line["topic"]) for line in lines] == [
            ("drop", 1, "kv@a"),
            ("hold", 2, "kv@a"),
            ("release", 2, "kv@a"),
        ]
        assert lines[0]["t_s"] <= lines[2]["t_s"]
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=20)
        assert process.returncode == 0
        assert "cannot obey standard input: line 1, `relaese`: unknown instruction" in said
    finally:
        process.kill()
        process.communicate()


def refused(*arguments: str) -> str:
    ended = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2 and ended.stdout == ""
    return ended.stderr


def test_wrong_input_is_refused_with_what_would_be_right() -> None:
    assert refused("--events", "tcp://127.0.0.1:1", "--do", "drop x") == (
        "error: cannot obey --do: line 1, `drop x`: `x` names no batches; legal: 17, 20-25, 40-, all\n"
    )
    assert refused("--events", "tcp://127.0.0.1:1", "--listen", "tcp://0.0.0.0:5") == (
        "error: `--listen` is `tcp://0.0.0.0:5` (from the command line)\n"
        "  legal: a loopback address such as tcp://127.0.0.1:5600; anything else needs `--insecure`\n"
    )
    assert refused("--events", "nonsense").startswith(
        "error: cannot listen on or connect to one of nonsense, auto, auto"
    )
    assert "unreadable" in refused("--events", "tcp://127.0.0.1:1", "--script", "unreadable")


def test_a_publisher_that_is_not_there_is_waited_for_aloud() -> None:
    began = time.monotonic()
    command = [*COMMAND, "--events", "ipc:///nonexistent/events", "--wait-s", "0.2"]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert "events" in json.loads(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert said == "warning: no publisher at `ipc:///nonexistent/events` after 0.2 s; going on, and waiting for it\n"
    assert process.returncode == 0 and time.monotonic() - began > 0.2
