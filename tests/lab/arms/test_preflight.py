from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvrelay.core.gates.evidence import Hardware
from kvrelay.lab.arms import local_process
from kvrelay.lab.arms.fleets import ArmWorker
from kvrelay.lab.arms.model_facts import StatedModel
from kvrelay.lab.arms.preflight import Finding, preflight

WORKER = ArmWorker(name="a", url="http://127.0.0.1:1", toml=(), engine="vllm", hardware=Hardware.CPU)


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer_config.json", "one.safetensors", "two.safetensors"):
        (tmp_path / name).write_text("{}")
    shards = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(shards))
    return tmp_path


def of_model(path: Path | str | None) -> Finding:
    return preflight(StatedModel(None if path is None else str(path)), [])[0]


@pytest.mark.covers("BM-04")
def test_a_snapshot_is_whole_and_its_path_absolute(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_model(snapshot).outcome == "ok"
    monkeypatch.chdir(snapshot.parent)
    assert of_model(snapshot.name).reason == f"`{snapshot.name}` is relative: it names another folder from elsewhere"
    assert of_model(None).outcome == "unknown"

    (snapshot / "two.safetensors").unlink()
    assert of_model(snapshot) == Finding("model snapshot", "fail", f"`{snapshot}` lacks two.safetensors")
    (snapshot / "config.json").unlink()
    assert of_model(snapshot).reason == f"`{snapshot}` lacks config.json, two.safetensors"


@pytest.mark.covers("BM-06")
@pytest.mark.parametrize(
    ("seed", "pid", "outcome"), [("0", 1, "ok"), ("17", 1, "fail"), (None, 1, "fail"), (None, None, "unknown")]
)
def test_workers_that_hash_by_chance_are_named(seed: str | None, pid: int | None, outcome: str) -> None:
    worker = msgspec.structs.replace(WORKER, pid=pid, hash_seed=seed)

    assert preflight(StatedModel(), [worker])[1].outcome == outcome


def test_a_process_is_found_by_its_port_and_looked_at_through_proc() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert local_process.listener_pid(url) == os.getpid()
    assert local_process.listener_pid("http://192.0.2.1:80") is None
    assert local_process.hardware_of_process(os.getpid()) in (Hardware.CPU, Hardware.GPU)
    assert local_process.remote_peers(2**22 + 1) is None


@pytest.mark.covers("BM-05")
def test_connections_beyond_loopback_and_environments_are_seen() -> None:
    code = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print('up', flush=True); sys.stdin.read()"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0"}
    child = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == b"up\n"
        seed = local_process.environment_of(child.pid, "PYTHONHASHSEED")
        worker = msgspec.structs.replace(WORKER, pid=child.pid, hash_seed=seed)
        assert [one.outcome for one in preflight(StatedModel(), [worker])[1:]] == ["ok", "ok", "ok", "ok"]
    finally:
        child.communicate(timeout=10)
    assert str(local_process._address("0100007F")) == "127.0.0.1"
    assert str(local_process._address("0000000000000000FFFF00000100007F")) == "::ffff:7f00:1"
    assert not local_process._is_local(local_process._address("08080808"))


@pytest.mark.covers("TR-09")
@pytest.mark.parametrize(
    ("words", "outcome", "says"),
    [
        (["--enable-hierarchical-cache"], "ok", "HiCache"),
        (["--page-size", "64"], "ok", "none is on"),
        (["--enable-hierarchical-cache", "--enable-lmcache"], "fail", "a has HiCache and LMCache on at once"),
    ],
)
def test_a_running_worker_with_two_implementations_of_tiers_is_named(words: list[str], outcome: str, says: str) -> None:
    code = "import sys; print('up', flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"up\n"
        worker = msgspec.structs.replace(WORKER, pid=child.pid)
        found = preflight(StatedModel(), [worker])[-1]
    finally:
        child.communicate(timeout=10)
    assert (found.outcome, says in found.reason) == (outcome, True), found
