"""An LMCache configuration as people and programs read it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from msgspec import to_builtins

from kvrelay.edge.connectors.lmcache.schema import KNOBS
from kvrelay.edge.connectors.lmcache.verdict import Reading, Verdict


def as_json(reading: Reading) -> str:
    converted = None if reading.refused else {"store": reading.store, "kv_connector_extra_config": reading.connector}
    fields = [{**to_builtins(verdict), **_turned(verdict.field)} for verdict in reading.verdicts]
    return json.dumps({"fields": fields, "converted": converted}, indent=2) + "\n"


def as_text(reading: Reading) -> str:
    """One block per field; then, unless something is refused, the section for kvrelay.toml."""
    blocks = [_block(verdict) for verdict in reading.verdicts]
    if not reading.refused:
        blocks.append(_toml(reading.store))
        blocks.append("# for kv_connector_extra_config: " + json.dumps(dict(reading.connector)))
    return "\n".join(blocks) + "\n"


def _block(verdict: Verdict) -> str:
    becomes = "" if verdict.becomes is None else f" -> {verdict.becomes}"
    lines = [f"# {verdict.field} = {json.dumps(verdict.value, default=str)}: {verdict.fate}{becomes}"]
    lines += [verdict.reason, *(f"{way}: {effect}" for way, effect in _turned(verdict.field).items())]
    return "\n#   ".join(lines)


def _turned(field: str) -> dict[str, str]:
    """What turning it does: unit, more, less; empty for fields that have no effect here."""
    knob = KNOBS.get(field)
    if knob is None:
        return {}
    return {way: said for way, said in (("unit", knob.unit), ("more", knob.more), ("less", knob.less)) if said}


def _toml(store: Mapping[str, Any]) -> str:
    lines = ["", "[store]", *(f"{key} = {json.dumps(value)}" for key, value in store.items() if key != "tiers")]
    for tier in store["tiers"]:
        lines += ["", "[[store.tiers]]", *(f"{key} = {json.dumps(value)}" for key, value in tier.items())]
    return "\n".join(lines)
