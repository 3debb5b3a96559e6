"""Contenders that are more than the name of a policy, as a TOML file.

[[contender]]
name = "quick to spill"
set = { "gateway.policy" = "sticky_load", "policy.sticky_load.spill_ratio" = 1.5 }
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

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


def _contender(item: Any) -> Contender:
    legal = "a table with `name` and `set`"
    if not isinstance(item, dict) or set(item) != {"name", "set"} or not isinstance(item["set"], dict):
        raise ContenderFileError(f"`{item}`", legal)
    contender = Contender(str(item["name"]), item["set"])
    try:
        load_config(flags=contender.sets)
    except ConfigError as problem:
        first = problem.problems[0]
        hint = f"`{first.nearest}`" if first.nearest else first.legal or "a known key with a legal value"
        raise ContenderFileError(
            f"`{contender.name}` sets `{first.key}`: {first.kind.replace('_', ' ')}", hint
        ) from None
    return contender
