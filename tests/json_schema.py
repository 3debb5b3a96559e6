"""The part of JSON schema that our own schemas use, checked independently of the code that writes them."""

from __future__ import annotations

from typing import Any

_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "object": dict,
    "array": list,
}


def violations(schema: dict[str, Any], value: object) -> list[str]:
    """Every place where `value` breaks `schema`; an unknown keyword is an error of the test itself."""
    return _check(schema, value, schema.get("$defs", {}), "$")


def _check(schema: dict[str, Any], value: object, defs: dict[str, Any], at: str) -> list[str]:
    found: list[str] = []
    for keyword, operand in schema.items():
        match keyword:
            case "$ref":
                found += _check(defs[operand.rpartition("/")[2]], value, defs, at)
            case "anyOf":
                if all(_check(option, value, defs, at) for option in operand):
                    found.append(f"{at}: {value!r} fits none")
            case "enum":
                if value not in operand:
                    found.append(f"{at}: {value!r} is not in {operand}")
            case "type":
                is_bool_as_number = isinstance(value, bool) and operand in ("integer", "number")
                if not isinstance(value, _TYPES[operand]) or is_bool_as_number:
                    found.append(f"{at}: {value!r} is no {operand}")
            case "minimum" | "exclusiveMinimum" | "maximum" if isinstance(value, int | float):
                kept = {"minimum": value >= operand, "exclusiveMinimum": value > operand, "maximum": value <= operand}
                if not kept[keyword]:
                    found.append(f"{at}: {value!r} breaks {keyword} {operand}")
            case "minimum" | "exclusiveMinimum" | "maximum":
                pass
            case "properties" if isinstance(value, dict):
                for name in operand.keys() & value.keys():
                    found += _check(operand[name], value[name], defs, f"{at}.{name}")
            case "required" if isinstance(value, dict):
                found += [f"{at}: {name} is missing" for name in operand if name not in value]
            case "additionalProperties" if isinstance(value, dict):
                for name in value.keys() - schema.get("properties", {}).keys():
                    if operand is False:
                        found.append(f"{at}: {name} is unknown")
                    elif isinstance(operand, dict):
                        found += _check(operand, value[name], defs, f"{at}.{name}")
            case "items" if isinstance(value, list) and isinstance(operand, dict):
                for number, item in enumerate(value):
                    found += _check(operand, item, defs, f"{at}[{number}]")
            case "properties" | "required" | "additionalProperties" | "items":
                pass
            case "$schema" | "$defs" | "title" | "description" | "default":
                pass
            case _:
                raise AssertionError(f"unknown keyword {keyword}")
    return found
