"""`kvrelay chaos tcp` as a process: JSON lines out, instructions in, and its refusals."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading

import pytest

COMMAND = [sys.executable, "-m", "kvrelay.cli.main", "chaos", "tcp"]


def test_it_passes_bytes_obeys_its_input_and_ends_well() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        process = subprocess.Popen(
            [*COMMAND, "--to", f"127.0.0.1:{port}", "--control", "127.0.0.1:0"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        try:
            ready = json.loads(process.stdout.readline())
            assert ready["pid"] == process.pid and ready["control"].startswith("http://127.0.0.1:")
            host, _, own_port = ready["address"].partition(":")
            with socket.create_connection((host, int(own_port)), timeout=10) as client:
                answering = threading.Thread(target=_answer_once, args=(server,))
                answering.start()
                client.sendall(b"ping")
                assert client.recv(4) == b"pong"
                process.stdin.write("rest\nreset\n")
                process.stdin.flush()
                with pytest.raises(ConnectionResetError):
                    client.recv(1)
                answering.join()
            lines = [json.loads(process.stdout.readline()) for _ in range(4)]
            assert [line["action"] for line in lines] == ["open", "begin", "reset", "close"]
            assert lines[3]["bytes_up"] == lines[3]["bytes_down"] == 4
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=20)
            assert process.returncode == 0
            assert "cannot obey standard input: line 1, `rest`: unknown instruction `rest`" in said
        finally:
            process.kill()
            process.communicate()


def _answer_once(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        assert connection.recv(4) == b"ping"
        connection.sendall(b"pong")
        try:
            connection.recv(1)
        except ConnectionResetError:
            pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "nowhere"], "error: `--to` is `nowhere` (from the command line)\n  legal: HOST:PORT"),
        (["--to", "127.0.0.1:1", "--do", "stal"], "error: cannot obey --do: line 1, `stal`: unknown instruction"),
        (["--to", "127.0.0.1:1", "--listen", "0.0.0.0:0"], "legal: a loopback address"),
    ],
)
def test_what_is_not_legal_is_refused(arguments: list[str], message: str) -> None:
    ended = subprocess.run([*COMMAND, *arguments], check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and message in ended.stderr and not ended.stdout
