"""Every field of an LMCache configuration ends in one of three ways, and says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvrelay.edge.connectors.lmcache.fields import NOT_NEEDED, REFUSED_WHEN_ON, REFUSED_WHEN_SET
from kvrelay.edge.connectors.lmcache.reader import DEFAULTS, Unreadable, read, read_file
from kvrelay.edge.connectors.lmcache.verdict import Host, Reading

HOST = Host(memory_gib=128, engine_gib=24, buffer_gib=12.8)
USUAL = {
    "chunk_size": 256,
    "local_cpu": True,
    "max_local_cpu_size": 20,
    "remote_url": "redis://10.0.0.5:6379",
    "remote_serde": "naive",
}


def fate(reading: Reading, field: str) -> str:
    return next(verdict.fate for verdict in reading.verdicts if verdict.field == field)


def test_a_usual_configuration_becomes_tiers_in_order() -> None:
    reading = read(USUAL, HOST)
    assert reading.refused == ()
    assert reading.store == {
        "failure_policy": "recompute",
        "tiers": [
            {"url": "memory://kvrelay", "bytes": 20 << 30, "eviction": "lru"},
            {"url": "valkey://10.0.0.5:6379/0"},
        ],
    }
    assert reading.connector == {"chunk_tokens": 256, "save_generated": False}
    assert {verdict.field for verdict in reading.verdicts} == USUAL.keys() | DEFAULTS.keys()


@pytest.mark.covers("TU-08")
def test_a_cache_above_what_the_host_has_left_is_refused_with_the_arithmetic() -> None:
    wanted = {"max_local_cpu_size": 120}
    (refused,) = read(wanted, Host(memory_gib=128, engine_gib=8, buffer_gib=12.8)).refused
    assert refused.reason == (
        "120 GiB of cache do not fit: this host has 128 GiB, of which the engine takes 8 and 12.8 stay free as a "
        "buffer; at most 107.2 GiB"
    )
    four = Host(memory_gib=128, engine_gib=8, buffer_gib=12.8, workers=4)
    assert read({"max_local_cpu_size": 20.8}, four).refused == ()
    (refused,) = read({"max_local_cpu_size": 21}, four).refused
    assert refused.reason.startswith("4 x 21 GiB of cache do not fit")


def test_an_unknown_field_is_refused_with_the_nearest_one() -> None:
    (refused,) = read({"chunk_sise": 128}, HOST).refused
    assert refused.reason == "unknown, so nobody can say what depends on it; did you mean `chunk_size`?"


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("chunk_size", 0, "legal: a whole number of tokens from 1 to 4096"),
        ("chunk_size", True, "legal: a whole number of tokens from 1 to 4096"),
        ("local_cpu", "yes", "legal: true or false"),
        ("max_local_cpu_size", -1, "legal: a number of GB, 0 or more"),
        ("max_local_cpu_size", float("nan"), "legal: a number of GB, 0 or more"),
        ("remote_serde", "cachegen", "loses precision without a stated bound; `fp8` has one"),
        ("remote_serde", "pickle", "legal: naive, torch, safetensor, fast"),
        ("cache_policy", "MRU", "legal: LRU, LFU, S3FIFO"),
        ("enable_blending", True, REFUSED_WHEN_ON["enable_blending"]),
        ("storage_plugins", ["mine"], REFUSED_WHEN_SET["storage_plugins"]),
        ("extra_config", {"a": 1}, REFUSED_WHEN_SET["extra_config"]),
    ],
)
def test_values_that_are_refused(field: str, value: Any, reason: str) -> None:
    assert [(v.field, v.reason) for v in read({field: value}, HOST).refused] == [(field, reason)]


@pytest.mark.parametrize(
    ("remote", "url"),
    [
        ("redis://h:1/3", "valkey://h:1/3"),
        ("rediss://h:1", "valkeys://h:1/0"),
        ("fs://host:0/mnt/kv", "file:///mnt/kv"),
        ("s3://models.s3.eu-west-1.amazonaws.com/kv", "s3://models/kv?region=eu-west-1"),
        ("s3://bucket", "s3://bucket/kvrelay"),
        ("mooncakestore://h:50051", "mooncake://h:50051"),
    ],
)
def test_remote_addresses(remote: str, url: str) -> None:
    assert read({"remote_url": remote}, HOST).store["tiers"][-1] == {"url": url}


@pytest.mark.parametrize("remote", ["lm://h:1", "redis://u:secret@h:1", "infinistore://h:1", "fs://h", "s3://h:1"])
def test_remote_addresses_that_are_refused(remote: str) -> None:
    (refused,) = read({"remote_url": remote}, HOST).refused
    assert refused.field == "remote_url" and "secret" not in refused.reason


def test_a_tier_on_disk_needs_a_bound() -> None:
    assert fate(read({"local_disk": "/mnt/kv"}, HOST), "max_local_disk_size") == "refused"
    bounded = read({"local_disk": "file:///mnt/kv", "max_local_disk_size": 1.5, "local_cpu": False}, HOST)
    assert bounded.refused == ()
    assert bounded.store["tiers"] == [{"url": "file:///mnt/kv", "bytes": 3 << 29, "eviction": "lru"}]


def test_fields_that_are_not_needed_say_why_and_switches_that_are_off_do_no_harm() -> None:
    reading = read({**dict.fromkeys(NOT_NEEDED, 1), **dict.fromkeys(REFUSED_WHEN_ON, False)}, HOST)
    assert reading.refused == ()
    assert all(verdict.reason for verdict in reading.verdicts)


def test_what_is_no_mapping_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "lmcache.yaml"
    for content, message in (("[1, 2]", "is not a mapping"), ("a: [", "is not YAML at line")):
        file.write_text(content)
        with pytest.raises(Unreadable, match=message):
            read_file(file)
    file.write_text("")
    assert read_file(file) == {}
