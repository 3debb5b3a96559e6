"""How things are meant to be, for processes that begin later."""

from __future__ import annotations

import socket
from typing import Any

import msgspec
import pytest

from kvrelay.core.model.units import Trigger
from kvrelay.core.routing.epochs import EpochState
from kvrelay.edge.fleet.change import WorkerClash
from kvrelay.edge.group.group import held_port
from kvrelay.edge.group.orders import Orders, Standing, read_orders
from kvrelay.edge.group.safety import refuse_unusable
from kvrelay.edge.system.config import Config, WorkerConfig


def worker(name: str, url: str = "") -> dict[str, Any]:
    return {"name": name, "url": url or f"http://{name}:1"}


def config(*names: str, policy: str = "cache_load") -> Config:
    return Config.model_validate({"gateway": {"policy": policy}, "workers": [worker(name) for name in names]})


def test_changes_of_the_admin_port_outlive_a_reload_that_does_not_speak_of_them() -> None:
    standing = Standing(config("a", "b"))
    standing.add_worker(WorkerConfig.model_validate(worker("c")))
    standing.remove_worker("b")
    standing.drain("a")
    standing.switch_policy("sticky", None)
    standing.take(config("a", "b", "d"))
    assert set(standing.workers) == {"a", "c", "d"}
    assert (standing.policy, list(standing.drained)) == ("sticky", ["a"])
    standing.take(config("d", policy="random"))
    assert set(standing.workers) == {"c", "d"}
    assert (standing.policy, list(standing.drained)) == (None, [])


def test_a_clash_leaves_everything_as_it_was() -> None:
    standing = Standing(config("a"))
    standing.add_worker(WorkerConfig.model_validate(worker("late", "http://x:1")))
    with pytest.raises(WorkerClash):
        standing.take(config("a", "x"))
    assert set(standing.workers) == {"a", "late"} and standing.config == config("a")


def test_a_worker_that_is_resumed_or_removed_is_not_drained_in_the_next_process() -> None:
    standing = Standing(config("a", "b"))
    for name in "ab":
        standing.drain(name)
    standing.resume("a")
    standing.remove_worker("b")
    assert list(standing.drained) == []


def test_an_address_that_only_one_process_could_bind_is_refused_before_any_is_started() -> None:
    bound = {**worker("a"), "events": "bind:tcp://127.0.0.1:5557"}
    with pytest.raises(
        ValueError, match=r"`events` of worker `a` is `bind:tcp://127.0.0.1:5557`: of several processes"
    ):
        refuse_unusable(Config.model_validate({"workers": [bound]}))


def test_orders_survive_the_pipe() -> None:
    whole = config("a", policy="sticky")
    orders = Orders(
        process=1,
        port=8000,
        hub_socket="/h",
        admin_socket="/a",
        config=whole.model_dump(mode="json"),
        workers=[],
        policy=None,
        scorer=None,
        drained=["a"],
        epochs=EpochState(2, {"t": 1}, {}, {"a": ("life", Trigger.REVISION)}),
        seed=2**62,
        key_seed=b"\x00\xff",
        fingerprint_secret=bytes(32),
        settle_s=5.0,
    )
    read = read_orders(msgspec.json.encode(orders))
    assert read == orders
    assert Config.model_validate(read.config) == whole


def test_a_port_is_held_for_those_who_share_it_and_refused_to_a_second_gateway() -> None:
    with held_port("127.0.0.1", 0) as holder:
        port = holder.getsockname()[1]
        with socket.socket() as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listening.bind(("127.0.0.1", port))
            listening.listen()
            with pytest.raises(OSError, match=rf"\('127.0.0.1', {port}\): address already in use"):
                held_port("127.0.0.1", port)
            with socket.create_connection(("127.0.0.1", port)):
                listening.accept()[0].close()
