"""`kvrelay store` on a directory: what it prints, and with which status it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from kvrelay.core.contract.fields import Contract
from kvrelay.edge.stores.backends import Backend
from kvrelay.edge.stores.config import open_store
from kvrelay.edge.stores.contracts import write_contract
from kvrelay.edge.stores.tiered import TieredStore, owner_of
from tests.edge.stores.test_tiered import KEYS, NAMESPACE, SHAPE, payload

COMMAND = (sys.executable, "-m", "kvrelay.cli.main", "store")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Six chunks in three pieces each."""
    url = f"file://{tmp_path / 'kv'}"
    store = TieredStore.open({"tiers": [{"url": url}], "deadline_ms": 5000, "piece_bytes": 3000})
    for number, key in enumerate(KEYS):
        assert store.store(NAMESPACE, key, SHAPE, [payload(number)], start_token=32 * number).stored
    store.close()
    return url


def objects(url: str) -> list[Path]:
    return sorted(path for path in (Path(url[7:]) / "objects").rglob("*") if path.is_file())


@pytest.mark.covers("CC-19")
def test_verify_names_damage_and_the_contract_that_differs(url: str, tmp_path: Path) -> None:
    disk = open_store(url)
    theirs = Contract(**{**CONTRACT_MEMBERS, "kv_dtype": "float32"})
    write_contract(disk, theirs, deadline_s=5)
    disk.close()
    (tmp_path / "mine.json").write_text(json.dumps(CONTRACT_MEMBERS))
    sound = run("verify", url, "--contract", str(tmp_path / "mine.json"))
    assert sound.returncode == 0, sound.stderr
    assert sound.stdout.startswith("24 objects, ") and ": 24 sound\n" in sound.stdout
    assert "differs in `kv_dtype`: 'float32' there, 'bfloat16' here" in sound.stdout
    victim = objects(url)[0]
    victim.write_bytes(victim.read_bytes()[:-1])
    damaged = run("verify", url, "--json")
    assert damaged.returncode == 1
    assert json.loads(damaged.stdout)["counts"] == {"hit": 23, "partial": 1}


CONTRACT_MEMBERS = dict.fromkeys(Contract.__struct_fields__, "x") | {"kv_dtype": "bfloat16", "block_size": 16}


@pytest.mark.covers("TR-24")
def test_scrub_deletes_what_can_never_be_a_hit(url: str) -> None:
    victim = next(path for path in objects(url) if len(path.name) > 80)
    victim.write_bytes(b"\0" * victim.stat().st_size)
    scrubbed = run("scrub", url, "--json")
    assert scrubbed.returncode == 0, scrubbed.stderr
    assert [json.loads(line)["outcome"] for line in scrubbed.stdout.splitlines()] == ["corrupt"]
    again = [json.loads(line) for line in run("scrub", url, "--json").stdout.splitlines()]
    assert [one["role"] for one in again] == ["manifest"], "a manifest whose piece is gone"
    assert run("verify", url).returncode == 0


@pytest.mark.covers("S34")
def test_purge_deletes_a_tenant_and_leaves_an_audit_record(url: str) -> None:
    tag = owner_of(NAMESPACE).tag.hex()
    other = owner_of(structs.replace(NAMESPACE, tenant="other")).tag.hex()
    assert json.loads(run("purge", url, "--tenant", other).stdout)["objects"] == 0
    purged = run("purge", url, "--tenant", tag)
    record = json.loads(purged.stdout)
    assert (record["objects"], record["left"], record["what"]) == (24, 0, f"tenant {tag}")
    assert objects(url) == []


def test_ls_and_stats(url: str) -> None:
    listed = [json.loads(line) for line in run("ls", url, "--json").stdout.splitlines()]
    assert len(listed) == 24
    assert {one["role"] for one in listed} == {"piece", "manifest"}
    assert "tenant-a" not in run("ls", url).stdout
    assert json.loads(run("stats", url, "--json").stdout)["objects"] == 24


def test_words_for_what_cannot_be_used() -> None:
    unknown = run("ls", "valky://127.0.0.1:1")
    assert unknown.returncode == 2 and "did you mean `valkey://`?" in unknown.stderr
    gone = run("stats", "valkey://127.0.0.1:1")
    assert gone.returncode == 3 and "Connection refused" in gone.stderr
    open_to_all = run("serve", "--host", "0.0.0.0")
    assert open_to_all.returncode == 2 and "--insecure" in open_to_all.stderr


def test_serve_is_a_peer_for_others() -> None:
    process = subprocess.Popen(
        [*COMMAND, "serve", "--port", "0", "--json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    ready: dict[str, Any] = json.loads(process.stdout.readline())
    first, second = (TieredStore.open({"tiers": [{"url": ready["url"]}], "deadline_ms": 5000}) for _ in range(2))
    assert first.store(NAMESPACE, KEYS[0], SHAPE, [payload(0)]).stored
    into = bytearray(SHAPE.payload_bytes)
    assert second.fetch(second.lookup(NAMESPACE, KEYS[:1], SHAPE), [memoryview(into)]).ready
    assert bytes(into) == payload(0)
    first.close()
    second.close()
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    process.stdout.close()


@pytest.mark.covers("TR-18")
def test_backends_are_listed_with_whether_they_can_be_used_here_and_tried_by_url(tmp_path: Path) -> None:
    listed = {
        one["url"].partition(":")[0]: one for one in map(json.loads, run("backends", "--json").stdout.splitlines())
    }
    assert set(listed) == {"memory", "file", "peer", "valkey", "s3", "mooncake"}
    assert all(listed[kind]["available"] for kind in ("memory", "file", "peer", "valkey"))
    assert [listed[kind]["scope"] for kind in ("file", "s3", "valkey")] == ["persistent", "persistent", "cluster"]
    tried = run("backends", f"file://{tmp_path}", "valkey://127.0.0.1:1")
    works, gone = tried.stdout.splitlines()
    assert tried.returncode == 1
    assert works.startswith(f"file://{tmp_path}  works: written in ")
    assert gone == "valkey://127.0.0.1:1  does not work: 127.0.0.1:1: Connection refused"
    assert objects(f"file://{tmp_path}") == [], "the probe is gone again"
    assert run("backends", "--json", f"file://{tmp_path}").returncode == 0


def test_a_backend_whose_package_is_not_there_says_what_brings_it() -> None:
    needs = Backend("s3://BUCKET", "nothing", (("no_such_package", "s3"),))
    assert needs.missing() == "`s3://BUCKET` needs the package `no_such_package`: pip install 'kvrelay[s3]'"
