"""A configuration key as it is explained to people: taken from the models, so that it cannot differ from them."""

from __future__ import annotations

import json
from typing import Any, Literal, get_args, get_origin

import annotated_types
from msgspec import Struct, structs
from pydantic import AfterValidator, BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from kvrelay.edge.system.sections import Supported

UNITS = {"s": "seconds", "ms": "milliseconds", "mb": "MiB", "bytes": "bytes", "ratio": "ratio"}
LIMITS = {annotated_types.Ge: "at least", annotated_types.Gt: "more than", annotated_types.Le: "at most"}


class ExplainedKey(Struct, frozen=True):
    key: str
    default: Any
    meaning: str
    effect: str
    unit: str | None
    legal: str
    environment: str | None

    def as_dict(self) -> dict[str, Any]:
        return structs.asdict(self)


def explained(entry: tuple[str, FieldInfo]) -> ExplainedKey:
    """Of a dotted name and its field."""
    dotted, info = entry
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    return ExplainedKey(
        key=dotted,
        default=_default(info),
        meaning=info.description or "",
        effect=str(extra.get("effect", "")),
        unit=UNITS.get(dotted.rsplit(".", 1)[-1].rsplit("_", 1)[-1]),
        legal=legal_values(info),
        environment=None if "[]" in dotted else "KVRELAY_" + dotted.upper().replace(".", "__"),
    )


def _default(info: FieldInfo) -> Any:
    if info.default is PydanticUndefined:
        return None
    if isinstance(info.default, BaseModel):
        return info.default.model_dump(mode="json")
    return list(info.default) if isinstance(info.default, tuple) else info.default


def legal_values(info: FieldInfo) -> str:
    """The names or the range that a key takes; empty where its type says it all."""
    supported = _supported(info)
    if supported:
        return ", ".join(f"`{json.dumps(value)}`" for value in supported) + " in this version"
    names = [f"`{name}`" for name in _literal_names(info.annotation)]
    limits = [
        f"{words} {getattr(limit, kind.__name__.lower())}"
        for limit in info.metadata
        for kind, words in LIMITS.items()
        if isinstance(limit, kind)
    ]
    return ", ".join(names or limits)


def _supported(info: FieldInfo) -> tuple[object, ...]:
    for entry in info.metadata:
        if isinstance(entry, AfterValidator) and isinstance(entry.func, Supported):
            return entry.func.values
    return ()


def _literal_names(annotation: Any) -> tuple[str, ...]:
    return get_args(annotation) if get_origin(annotation) is Literal else ()
