"""Policies by the name that operators use."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import partial

from kvrelay.core.policy.cache_load import CacheLoad, Scorer
from kvrelay.core.policy.least_load import LeastLoad
from kvrelay.core.policy.policy import Policy
from kvrelay.core.policy.random import Random
from kvrelay.core.policy.round_robin import RoundRobin
from kvrelay.core.policy.score_predict import PredictScorer
from kvrelay.core.policy.score_weights import WeightsScorer
from kvrelay.core.policy.sticky import Sticky
from kvrelay.core.policy.sticky_load import StickyLoad
from kvrelay.core.routing.settings import Spill, Weights

POLICIES = ("cache_load", "least_load", "random", "round_robin", "sticky", "sticky_load")
SCORERS = ("predict", "weights")


class UnknownName(ValueError):
    """A policy or scorer that does not exist; carries what was received and what is legal."""

    def __init__(self, kind: str, received: str, legal: tuple[str, ...]) -> None:
        nearest = difflib.get_close_matches(received, legal, n=1)
        hint = f"; did you mean `{nearest[0]}`?" if nearest else ""
        super().__init__(f"unknown {kind} `{received}`; known: {', '.join(f'`{name}`' for name in legal)}{hint}")
        self.kind, self.received, self.legal = kind, received, legal


def make_policy(name: str, scorer: str, weights: Weights, spill: Spill) -> Policy:
    """A fresh policy; UnknownName for a name that does not exist."""
    simple: dict[str, Callable[[], Policy]] = {
        "least_load": LeastLoad,
        "random": Random,
        "round_robin": RoundRobin,
        "sticky": Sticky,
        "sticky_load": partial(StickyLoad, spill),
    }
    if name in simple:
        return simple[name]()
    if name != "cache_load":
        raise UnknownName("policy", name, POLICIES)
    return CacheLoad(_make_scorer(scorer, weights))


def _make_scorer(name: str, weights: Weights) -> Scorer:
    match name:
        case "predict":
            return PredictScorer()
        case "weights":
            return WeightsScorer(weights)
        case _:
            raise UnknownName("scorer", name, SCORERS)
