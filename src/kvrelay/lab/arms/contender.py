"""What is compared: contenders, each a name and the configuration keys that it sets. Nothing else may differ.

A key belongs to a factor. One causal variable at a time: neighbours in a plan of contenders (router, then CPU tier,
then remote tier, then prefill/decode split) differ in exactly one factor, or the cause of a difference cannot be told.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from msgspec import Struct

from kvrelay.edge.connectors.tiering import implementations

Scalar = str | int | float | bool

FACTORS: dict[str, tuple[str, ...]] = {
    "router": ("gateway.policy", "gateway.scorer", "policy.", "affinity."),
    "retry": ("retry.",),
    "queue": ("gateway.limits.",),
    "store": ("store.",),
    "disaggregation": ("workers.role",),
    "engine": ("engine.",),
    "tokens": ("tokens.",),
    "index": ("index.",),
    "health": ("health.",),
}
"""Prefixes of configuration keys. A key of no factor is a factor of its own."""

ITS_OWN = (
    "gateway.port", "gateway.admin_port", "receipts.path", "workers.url", "workers.events", "workers.replay",
)  # fmt: skip
"""Keys in which every arm is its own, because it has its own ports and files."""


_TIER_FLAGS = ("--hicache-", "--page-size")
"""Arguments that say how a tier works; a page of more than one token is what HiCache moves at once."""


class Weights(Struct, frozen=True):
    """Factors of the `weights` scorer under test, see `[policy.cache_load]`."""

    alpha: float
    beta: float
    gamma: float
    delta: float

    @property
    def name(self) -> str:
        """As it is written on the command line; the name of its arms."""
        return f"{self.alpha:g},{self.beta:g},{self.gamma:g},{self.delta:g}"


class Contender(Struct, frozen=True):
    """`sets` has dotted keys of the gateway's configuration. `store`: the section `[store]` that its workers share KV
    through; None: they share nothing. `engine_args`: with what somebody has to start real workers for this arm."""

    name: str
    sets: Mapping[str, Scalar]
    store: Mapping[str, Any] | None = None
    engine_args: tuple[str, ...] = ()

    def flat(self) -> dict[str, Any]:
        """Everything that tells it from another one, as dotted keys. Arguments that turn a tier on belong to the
        factor `store`, all others are one thing of the engine's."""
        tiering: list[str] = []
        others: list[str] = []
        for words in grouped(self.engine_args):
            (tiering if implementations(words) or words[0].startswith(_TIER_FLAGS) else others).append(" ".join(words))
        found: dict[str, Any] = {**self.sets, **dict(_flatten({"store": self.store or {}}))}
        found |= {f"store.engine {words}": True for words in tiering}
        return found | {f"engine.{words}": True for words in others}

    @classmethod
    def of_policy(cls, policy: str) -> Contender:
        return cls(policy, {"gateway.policy": policy})

    @classmethod
    def of_weights(cls, weights: Weights) -> Contender:
        factors = {f"policy.cache_load.{name}": getattr(weights, name) for name in Weights.__struct_fields__}
        return cls(weights.name, {"gateway.policy": "cache_load", "gateway.scorer": "weights", **factors})


class Difference(Struct, frozen=True):
    """One key that two configurations have otherwise; None: it is not set there."""

    key: str
    factor: str
    left: Any
    right: Any


def factor_of(key: str) -> str:
    """Of a dotted key without the names of workers in it."""
    return next((name for name, starts in FACTORS.items() if key.startswith(starts)), key)


def differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Of two flat configurations, apart from what every arm has of its own; in the order of the keys."""
    found = []
    for key in sorted({*left, *right}):
        plain = plain_key(key)
        if left.get(key) != right.get(key) and plain not in ITS_OWN:
            found.append(Difference(key, factor_of(plain), left.get(key), right.get(key)))
    return tuple(found)


def read_flat(path: Path) -> dict[str, Any]:
    """A TOML file as dotted keys; `[[workers]]` by their names. Raises OSError or tomllib.TOMLDecodeError."""
    return dict(_flatten(tomllib.loads(path.read_text(encoding="utf-8"))))


def plan_problems(contenders: Sequence[Contender]) -> tuple[str, ...]:
    """Why a difference between neighbours could not be put down to one cause; empty when it can."""
    names = [contender.name for contender in contenders]
    problems = [f"two contenders are called `{name}`" for name in dict.fromkeys(names) if names.count(name) > 1]
    for left, right in pairwise(contenders):
        factors = sorted({difference.factor for difference in differences(left.flat(), right.flat())})
        if len(factors) > 1:
            problems.append(f"`{left.name}` and `{right.name}` differ in {len(factors)} factors: {', '.join(factors)}")
        elif not factors:
            problems.append(f"`{left.name}` and `{right.name}` do not differ at all")
    return tuple(problems)


def _flatten(table: Mapping[str, Any], at: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in table.items():
        dotted = f"{at}{name}"
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{dotted}.")
        elif isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
            for number, item in enumerate(value):
                yield from _flatten(item, f"{dotted}[{item.get('name', number)}].")
        else:
            yield dotted, value


def grouped(args: Sequence[str]) -> list[tuple[str, ...]]:
    """Arguments with their values: a group begins at each word with two hyphens."""
    groups: list[list[str]] = []
    for word in args:
        if word.startswith("--") or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    return [tuple(group) for group in groups]


def plain_key(key: str) -> str:
    """`workers[a].url` is `workers.url`."""
    head, bracket, rest = key.partition("[")
    return head + rest.partition("]")[2] if bracket else key
