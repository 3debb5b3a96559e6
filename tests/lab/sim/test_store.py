"""Workers that share a store under virtual time: what the processes' store does, and what only a simulation can hit."""

from __future__ import annotations

import numpy as np
import pytest

from kvrelay.core.engine.engine import BlocksLoaded, EngineSettings, Finished
from kvrelay.core.engine.payload import PAYLOAD_BYTES, PayloadModel
from kvrelay.core.engine.sequence import EngineRequest
from kvrelay.core.routing.settings import RouterSettings
from kvrelay.edge.stores.memory import MemoryStore
from kvrelay.lab.sim.store import Place, SharedTiers
from kvrelay.lab.sim.worker import Life, WorkerSetup
from kvrelay.lab.sim.world import SimRequest, World

SIZE, CHUNK_BLOCKS = 16, 4
DEADLINE_S = 0.5
TOKENS = np.arange(SIZE * CHUNK_BLOCKS * 3 + 5, dtype=np.uint32)


class Client:
    """Of one engine request."""

    def __init__(self) -> None:
        self.finished: Finished | None = None
        self.refused = False

    def on_token(self, token_id: int) -> None: ...
    def on_lost(self) -> None: ...

    def on_finished(self, finished: Finished) -> None:
        self.finished = finished

    def on_refused(self) -> None:
        self.refused = True

    @property
    def cached_tokens(self) -> int:
        assert self.finished is not None
        return self.finished.cached_tokens


class Sharing:
    """Two workers over one place; a tier of their own before it where `local` says how large."""

    def __init__(self, *, failure_policy: str = "recompute", local_bytes: int | None = None, **setup: object) -> None:
        self.objects = MemoryStore()
        self.place = Place(self.objects)
        tiers = [{"url": "peer://store.sim:1", "name": "remote"}]
        places: list[Place | None] = [self.place]
        if local_bytes is not None:
            tiers.insert(0, {"url": "memory://", "name": "local", "bytes": local_bytes})
            places.insert(0, None)
        options = {
            "tiers": tiers,
            "failure_policy": failure_policy,
            "deadline_ms": DEADLINE_S * 1000,
            "break_even": False,
            "probe_interval_s": 0.2,
        }
        self.tiers = SharedTiers(options, places, chunk_blocks=CHUNK_BLOCKS, seed=7)
        self.loaded: list[tuple[str, int]] = []
        self.tiers.on_loaded = self._note
        engines = setup or {"w0": EngineSettings(), "w1": EngineSettings()}
        self.world = World(
            [WorkerSetup(name=name, engine=engine) for name, engine in engines.items()],  # type: ignore[arg-type]
            settings=RouterSettings(policy="round_robin", key_seed=b"test"),
            connect=self.tiers.connect,
        )
        self._requests = 0

    def _note(self, life: Life, loaded: BlocksLoaded) -> None:
        self.loaded.append((life.id.name, len(loaded.payloads)))

    def ask(self, worker: str, tokens: np.ndarray = TOKENS, *, within_s: float = 2.0, **more: object) -> Client:
        client = Client()
        life = self.world.workers[worker].life
        assert life is not None
        self._requests += 1
        request = EngineRequest(f"r{self._requests}", tokens, 2, **more)  # type: ignore[arg-type]
        life.submit(request, client)
        self.wait(within_s)
        return client

    def wait(self, seconds: float) -> None:
        self.world.run(until_s=self.world.now_s + seconds)

    def names(self) -> list[bytes]:
        return [info.key for info in self.objects.scan(deadline_s=1)]


def test_what_one_worker_computed_another_loads() -> None:
    fleet = Sharing()
    assert fleet.ask("w0").cached_tokens == 0
    assert len(fleet.names()) == 3
    assert fleet.ask("w1").cached_tokens == 3 * CHUNK_BLOCKS * SIZE
    assert fleet.loaded == [("w1", 3 * CHUNK_BLOCKS)]
    assert fleet.ask("w1").cached_tokens >= 3 * CHUNK_BLOCKS * SIZE and len(fleet.loaded) == 1


@pytest.mark.parametrize(
    "other",
    [{"salt": "somebody"}, {"salt": "somebody~epoch-1"}, {"adapter": "ad"}],
    ids=["tenant", "epoch", "adapter"],
)
def test_nobody_loads_what_is_of_another_namespace(other: dict[str, str]) -> None:
    fleet = Sharing()
    fleet.ask("w0")
    assert fleet.ask("w1", **other).cached_tokens == 0
    assert fleet.loaded == [] and len(fleet.names()) == 6


def test_workers_of_different_weights_share_nothing() -> None:
    fleet = Sharing(w0=EngineSettings(model="m@1"), w1=EngineSettings(model="m@2"))
    fleet.ask("w0")
    assert fleet.ask("w1").cached_tokens == 0 and fleet.loaded == []


def test_a_place_that_refuses_costs_nothing_and_one_that_stalls_its_deadline() -> None:
    fleet = Sharing()
    fleet.ask("w0")
    fleet.place.reach = "refuse"
    refused = fleet.ask("w1", within_s=0.1)
    assert refused.cached_tokens == 0
    stalled = Sharing()
    stalled.place.reach = "stall"
    waiting = stalled.ask("w1", within_s=DEADLINE_S - 0.01)
    assert waiting.finished is None
    stalled.wait(0.2)
    assert waiting.cached_tokens == 0


def test_what_stalled_goes_on_when_the_place_is_mended() -> None:
    fleet = Sharing()
    fleet.ask("w0")
    fleet.place.reach = "stall"
    waiting = fleet.ask("w1", within_s=0.1)
    assert waiting.finished is None
    fleet.place.mend()
    fleet.wait(0.3)
    assert waiting.cached_tokens == 3 * CHUNK_BLOCKS * SIZE


def test_by_the_policy_fail_the_worker_answers_with_an_error() -> None:
    fleet = Sharing(failure_policy="fail")
    fleet.place.reach = "refuse"
    client = fleet.ask("w0")
    assert client.refused and client.finished is None


def test_a_worker_that_ends_in_the_middle_of_a_save_stores_nothing_more() -> None:
    fleet = Sharing()
    client = fleet.ask("w0", within_s=0.0)
    while len(fleet.names()) < 1:
        fleet.world.agenda.step()
    assert client.finished is not None
    fleet.world.kill("w0")
    fleet.wait(1.0)
    assert len(fleet.names()) == 1
    assert fleet.ask("w1").cached_tokens == CHUNK_BLOCKS * SIZE  # what was whole by then


def test_a_worker_that_stands_still_takes_nothing_from_the_store_until_it_goes_on() -> None:
    fleet = Sharing()
    fleet.ask("w0")
    client = fleet.ask("w1", within_s=0.01)
    fleet.world.freeze("w1")
    fleet.wait(0.2)
    assert fleet.loaded == [] and client.finished is None
    fleet.world.thaw("w1")
    fleet.wait(1.0)
    assert client.cached_tokens == 3 * CHUNK_BLOCKS * SIZE


def test_a_client_that_leaves_during_the_load_is_not_computed_for() -> None:
    fleet = Sharing()
    fleet.ask("w0")
    client = fleet.ask("w1", within_s=0.01)
    life = fleet.world.workers["w1"].life
    assert life is not None
    life.abort("r2")
    fleet.wait(1.0)
    assert client.finished is None and life.engine.unfinished_requests == 0
    fleet.world.check()


def test_a_tier_in_a_workers_own_memory_goes_with_its_life() -> None:
    fleet = Sharing(local_bytes=1 << 20)
    fleet.ask("w0")
    fleet.place.reach = "refuse"
    fleet.world.reset_cache("w0")
    assert fleet.ask("w0").cached_tokens == 3 * CHUNK_BLOCKS * SIZE
    fleet.world.restart("w0")
    assert fleet.ask("w0").cached_tokens == 0


def test_receipts_say_what_came_of_the_store() -> None:
    fleet = Sharing()
    for number, reach in enumerate(("ok", "ok", "refuse")):
        at_s = 1.0 + number
        fleet.world.at(at_s, lambda reach=reach: setattr(fleet.place, "reach", reach))
        fleet.world.submit(
            at_s, SimRequest(request_id=f"r{number}", token_ids=TOKENS + number // 2, model="mock-model")
        )
    fleet.world.run()
    told = [(each.remote_outcome, each.remote_reason, each.remote_loaded_tokens) for each in fleet.world.receipts]
    assert told == [("none", "absent", 0), ("hit", None, 3 * CHUNK_BLOCKS * SIZE), ("none", "unavailable", 0)]


def test_what_is_loaded_is_what_the_engine_would_have_computed() -> None:
    fleet = Sharing()
    seen: list[BlocksLoaded] = []
    fleet.tiers.on_loaded = lambda life, loaded: seen.append(loaded)
    fleet.world.restart("w1")
    fleet.ask("w0")
    fleet.ask("w1")
    model = PayloadModel(EngineSettings().model)
    payload, chain = model.root(adapter=None, salt=None), []
    for block in range(3 * CHUNK_BLOCKS):
        payload = model.block(payload, TOKENS[block * SIZE :][:SIZE].astype("<u4").tobytes())
        chain.append(payload)
    assert [each.payloads for each in seen] == [chain] and len(payload) == PAYLOAD_BYTES
