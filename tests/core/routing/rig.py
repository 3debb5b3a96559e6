"""A router with hand-driven workers: every test says in events what happens and looks at the effects."""

from __future__ import annotations

import numpy as np

from kvrelay.core.model.effects import Dispatch, WriteReceipt
from kvrelay.core.model.events import (
    AttemptAccepted,
    AttemptFailed,
    BlocksRemoved,
    BlocksStored,
    FirstTokenSeen,
    KvBatch,
    ReplayArrived,
    RequestArrived,
    RequestFinished,
    WorkerJoined,
    WorkerLeft,
    WorkerSpec,
)
from kvrelay.core.model.ids import WorkerId
from kvrelay.core.model.prompt import Prompt, Tenant, Usage
from kvrelay.core.model.units import Fault
from kvrelay.core.receipts.receipt import Receipt
from kvrelay.core.routing.router import Router
from kvrelay.core.routing.settings import RouterSettings

SIZE = 16


def text(*parts: int, blocks: int = 1) -> np.ndarray:
    """Tokens of a prompt made of numbered parts, each `blocks` blocks long; equal numbers are equal parts."""
    return np.concatenate([np.arange(blocks * SIZE, dtype=np.uint32) + 100_000 * part for part in parts])


class Rig:
    """Drives one router. `now` goes on by itself a little with every event."""

    def __init__(self, **settings) -> None:
        self.router = Router(RouterSettings(**{"key_seed": b"rig", "manifest_digest": "m1", **settings}))
        self.now = 0.0
        self.effects: list = []
        self.receipts: list[Receipt] = []
        self._seq: dict[tuple, int] = {}
        self._requests = 0

    def step(self, event) -> tuple:
        self.now += 0.001
        effects = self.router.step(self.now, event)
        self.effects += effects
        self.receipts += [effect.receipt for effect in effects if isinstance(effect, WriteReceipt)]
        self.router.check()
        return effects

    # --- workers ---

    def join(self, *names: str, incarnation: str = "1", **spec) -> None:
        for name in names:
            worker = WorkerId(name, incarnation)
            given = {"url": f"http://{name}", "block_size_tokens": SIZE, "engine": "mock", **spec}
            self.step(WorkerJoined(worker, WorkerSpec(**given)))
            for rank in range(given.get("ranks", 1)):
                self.step(ReplayArrived(worker, rank, ()))
                self._seq[worker, rank] = 0

    def leave(self, name: str) -> None:
        self.step(WorkerLeft(name))

    def live_id(self, name: str) -> WorkerId:
        return next(WorkerId(w.name, w.incarnation) for w in self.router.status(self.now).workers if w.name == name)

    def publish(self, name: str, *events, rank: int = 0, worker: WorkerId | None = None) -> tuple:
        worker = worker or self.live_id(name)
        seq = self._seq[worker, rank]
        self._seq[worker, rank] = seq + 1
        return self.step(KvBatch(worker, rank, seq, events))

    def hashes(self, tokens, size: int = SIZE, **tags) -> tuple[int, ...]:
        """What an engine would call the blocks: not our keys."""
        return tuple(int(k) ^ 0xABCDEF for k in self.router.keyer.prompt_keys(tokens, size, **tags))

    def hold(self, name: str, tokens, rank: int = 0, size: int = SIZE, **tags) -> None:
        """The worker announces that it has all full blocks of these tokens."""
        event = BlocksStored(self.hashes(tokens, size, **tags), None, tokens, size, **tags)
        self.publish(name, event, rank=rank)

    def evict(self, name: str, tokens, *, keep_blocks: int = 0) -> None:
        self.publish(name, BlocksRemoved(self.hashes(tokens)[keep_blocks:][::-1]))

    # --- requests ---

    def arrive(self, tokens=None, *, request_id: str | None = None, draw: int = 0, unscored=None, **more) -> tuple:
        self._requests += 1
        request_id = request_id or f"r{self._requests}"
        self.last = request_id
        tags = {"adapter": more.get("adapter")}
        sizes = self.router.block_sizes()
        if tokens is None:
            prompt = Prompt(more.pop("prompt_tokens", 100), {}, unscored or "not_tokenized")
        else:
            keys = {size: self.router.keyer.prompt_keys(tokens, size, **tags) for size in sizes}
            prompt = Prompt(len(tokens) + 1, keys)  # a full block is only ever hit if something follows it
        return self.step(RequestArrived(request_id, prompt, draw=draw, **more))

    def ask(self, tokens=None, **more) -> str | None:
        """A request arrives; answers the name of the worker it is sent to."""
        return chosen(self.arrive(tokens, **more))

    def accept(self, request_id: str | None = None, attempt: int = 1) -> None:
        self.step(AttemptAccepted(request_id or self.last, attempt))

    def fail(self, fault: Fault, request_id: str | None = None, attempt: int = 1, **more) -> tuple:
        return self.step(AttemptFailed(request_id or self.last, attempt, fault, **more))

    def finish(self, request_id: str | None = None, *, cached=None, prompt=None, http_status=200, **more) -> Receipt:
        request_id = request_id or self.last
        self.step(FirstTokenSeen(request_id))
        self.step(RequestFinished(request_id, http_status, Usage(prompt, 8, cached), **more))
        return self.receipts[-1]

    def serve(self, tokens=None, *, cached=None, **more) -> Receipt:
        """A whole request without trouble."""
        self.arrive(tokens, **more)
        self.accept()
        return self.finish(cached=cached)

    def load(self, name: str) -> list[int]:
        worker = next(w for w in self.router.status(self.now).workers if w.name == name)
        target = worker.targets[0]
        return [target.active_requests, target.active_prefill_tokens, target.active_decode_blocks]


def chosen(effects) -> str | None:
    return next((effect.worker.name for effect in effects if isinstance(effect, Dispatch)), None)


TENANT_A = Tenant("a", b"key of a")
TENANT_B = Tenant("b", b"key of b")
