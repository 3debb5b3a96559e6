"""An LMCache configuration as people and programs read it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from msgspec import to_builtins

from kvrelay.edge.connectors.lmcache.verdict import Reading, Verdict


def as_json(reading: Reading) -> str:
    converted = None if reading.refused else {"store": reading.store, "kv_connector_extra_config": reading.connector}
    return json.dumps({"fields": to_builtins(reading.verdicts), "converted": converted}, indent=2) + "\n"


def as_text(reading: Reading) -> str:
    """One block per field; then, unless something is refused, the section for kvrelay.toml."""
    blocks = [_block(verdict) for verdict in reading.verdicts]
    if not reading.refused:
        blocks.append(_toml(reading.store))
        blocks.append("# for kv_connector_extra_config: " + json.dumps(dict(reading.connector)))
    return "\n".join(blocks) + "\n"


def _block(verdict: Verdict) -> str:
    becomes = "" if verdict.becomes is None else f" -> {verdict.becomes}"
    return (
        f"# {verdict.field} = {json.dumps(verdict.value, default=str)}: {verdict.fate}{becomes}\n#   {verdict.reason}"
    )


def _toml(store: Mapping[str, Any]) -> str:
    lines = ["", "[store]", *(f"{key} = {json.dumps(value)}" for key, value in store.items() if key != "tiers")]
    for tier in store["tiers"]:
        lines += ["", "[[store.tiers]]", *(f"{key} = {json.dumps(value)}" for key, value in tier.items())]
    return "\n".join(lines)
