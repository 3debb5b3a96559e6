"""Endpoints as a worker states them, seen from another process."""

from __future__ import annotations

import pytest

from kvrelay.edge.connectors.vllm.describe import binds_by_vllms_rule, reachable


@pytest.mark.covers("MK-11")
@pytest.mark.parametrize(
    ("stated", "host", "seen"),
    [
        ("tcp://*:20081", "127.0.0.1", "tcp://127.0.0.1:20081"),
        ("tcp://0.0.0.0:20081", "gpu-1", "tcp://gpu-1:20081"),
        ("tcp://[::]:20081", "::1", "tcp://[::1]:20081"),
        ("tcp://127.0.0.1:6700", "gpu-1", "tcp://127.0.0.1:6700"),
        ("ipc:///run/kv", "gpu-1", "ipc:///run/kv"),
    ],
)
def test_every_interface_means_the_host_of_the_workers_url(stated: str, host: str, seen: str) -> None:
    assert reachable(stated, host) == seen


@pytest.mark.parametrize(
    ("endpoint", "worker_listens"),
    [
        ("tcp://*:5557", True),
        ("tcp://[::]:5557", True),
        ("ipc:///run/kv", True),
        ("inproc://kv", True),
        ("tcp://127.0.0.1:6700", False),
        ("tcp://router:6700", False),
    ],
)
def test_who_listens_follows_from_the_endpoints_text(endpoint: str, worker_listens: bool) -> None:
    assert binds_by_vllms_rule(endpoint) == worker_listens
