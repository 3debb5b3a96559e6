"""Contenders that are more than the name of a policy, as a TOML file.

[[contender]]
name = "quick to spill"
set = { "gateway.policy" = "sticky_load", "policy.sticky_load.spill_ratio" = 1.5 }

[[contender]]
name = "gpu+cpu"
set = { "gateway.policy" = "cache_load" }
store = { tiers = [ { url = "memory://plan", bytes = 1073741824 } ] }

`store` is the section `[store]` that the arm's workers share KV through; `engine_args` is what real workers have to be
started with for it. One implementation of tiers per arm, or nobody could say which of two made the difference.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from kvrelay.edge.connectors.tiering import OneTierOnly, one_only
from kvrelay.edge.system.config import ConfigError, load_config
from kvrelay.lab.arms.contender import Contender


class ContenderFileError(Exception):
    """What was found, and what would be legal."""

    def __init__(self, found: str, legal: str) -> None:
        super().__init__(f"{found}; legal: {legal}")
        self.found, self.legal = found, legal


def read_contenders(path: Path) -> tuple[Contender, ...]:
    """Raises OSError or ContenderFileError. Every key is tried on a configuration before an arm is started with it."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise ContenderFileError(str(problem), "TOML in UTF-8") from problem
    found = table.get("contender")
    if set(table) != {"contender"} or not isinstance(found, list) or not found:
        raise ContenderFileError(
            f"tables {', '.join(table) or 'none'}", "one [[contender]] table or more, nothing else"
        )
    return tuple(_contender(item) for item in found)


_MEMBERS = frozenset(("name", "set", "store", "engine_args"))


def _are_words(args: Any) -> bool:
    return isinstance(args, list) and all(isinstance(word, str) for word in args)


def _check_tiers(contender: Contender) -> None:
    """Raises ContenderFileError."""
    where = f"`{contender.name}`"
    try:
        one_only(contender.engine_args, has_store=contender.store is not None, where=where)
    except OneTierOnly as problem:
        raise ContenderFileError(str(problem), "one of them per arm, each in an arm of its own") from None
    if contender.store is not None:
        from kvrelay.edge.stores.config import StoreConfig, StoreConfigError  # only who has tiers needs what they need

        try:
            StoreConfig.from_mapping(contender.store, source=where)
        except StoreConfigError as problem:
            raise ContenderFileError(str(problem), "the members of the section `[store]`") from None


def _contender(item: Any) -> Contender:
    legal = "a table with `name` and `set`, and if need be `store` and `engine_args`"
    if not isinstance(item, dict) or not {"name", "set"} <= set(item) <= _MEMBERS:
        raise ContenderFileError(f"`{item}`", legal)
    store, args = item.get("store"), item.get("engine_args", [])
    if not isinstance(item["set"], dict) or not isinstance(store, dict | None) or not _are_words(args):
        raise ContenderFileError(f"`{item}`", legal)
    contender = Contender(str(item["name"]), item["set"], store, tuple(args))
    _check_tiers(contender)
    try:
        load_config(flags=contender.sets)
    except ConfigError as problem:
        first = problem.problems[0]
        hint = f"`{first.nearest}`" if first.nearest else first.legal or "a known key with a legal value"
        raise ContenderFileError(
            f"`{contender.name}` sets `{first.key}`: {first.kind.replace('_', ' ')}", hint
        ) from None
    return contender
