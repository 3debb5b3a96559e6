"""What the clients of a fuzzed fleet ask, and of whom."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from kvrelay.core.model.prompt import Tenant, TokenIds
from kvrelay.core.routing.epochs import Epochs
from kvrelay.lab.drills.fuzz.schedule import Ask, FleetPlan

MODEL, OTHER_WEIGHTS, ADAPTER = "mock-model", "mock-model@v2", "ad"
SALTS = (None, "salt-of-one", "salt-of-two")


def tenant_of(ask: Ask) -> Tenant:
    return Tenant(f"t{ask.tenant}", salt=SALTS[ask.tenant])


def adapter_of(ask: Ask) -> str | None:
    return ADAPTER if ask.adapter else None


def salted_now(ask: Ask, epochs: Epochs) -> Tenant:
    """As the gateway would salt it now."""
    tenant = tenant_of(ask)
    return epochs.salted(tenant, epochs.tag(tenant.name, adapter_of(ask)))


def weights_of(fleet: FleetPlan, worker: str) -> str:
    """What the worker of this name computes with."""
    other = fleet.store is not None and fleet.store.mixed and worker == f"w{fleet.workers - 1}"
    return OTHER_WEIGHTS if other else MODEL


@lru_cache(maxsize=4096)
def tokens_of(root: int, turns: int, tokens: int) -> TokenIds:
    parts = [
        np.random.default_rng([root, piece]).integers(0, 50_000, tokens if piece == 0 else 9) for piece in range(turns)
    ]
    return np.concatenate(parts).astype(np.uint32)
