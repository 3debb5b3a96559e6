"""Why two requests get different tokens: the first difference in what a template writes, in the order it writes it.

Two requests may mean the same and share nothing: tools in another order, a schema whose members were put together
differently, a time in the system prompt. JSON says they are equal; a prefix cache does not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal

from msgspec import Struct

from kvrelay.edge.tokens.template import as_templates_expect, tool_as_templates_expect

Kind = Literal["order", "member_order", "value", "only_left", "only_right"]
IN_TEMPLATE_ORDER = (
    "tools",
    "documents",
    "system",
    "messages",
    "prompt",
    "add_generation_prompt",
    "chat_template_kwargs",
)
_NOTHING = object()


class Difference(Struct, frozen=True):
    """`path` as in `tools[0].function.parameters`. Values are as given, cut to what is different."""

    path: str
    kind: Kind
    left: Any
    right: Any


def first_difference(left: Mapping[str, Any], right: Mapping[str, Any]) -> Difference | None:
    """Of two decoded request bodies; None when templates are given the same. Members' order counts, as in the files."""
    one, other = _seen_by_template(left), _seen_by_template(right)
    for name in IN_TEMPLATE_ORDER:
        found = _compare(name, one.get(name, _NOTHING), other.get(name, _NOTHING))
        if found is not None:
            return found
    return None


def _seen_by_template(body: Mapping[str, Any]) -> dict[str, Any]:
    """What the engine itself puts into one shape differs no more."""
    seen = dict(body)
    try:
        if isinstance(seen.get("tools"), list):
            seen["tools"] = [tool_as_templates_expect(tool) for tool in seen["tools"]]
        if isinstance(seen.get("messages"), list):
            seen["messages"] = [as_templates_expect(one, wants_parts=False) for one in seen["messages"]]
    except Exception:  # shapes that no template takes are compared as they are
        return dict(body)
    return seen


def _compare(path: str, left: Any, right: Any) -> Difference | None:
    if left is _NOTHING and right is _NOTHING:
        return None
    if left is _NOTHING:
        return Difference(path, "only_right", None, right)
    if right is _NOTHING:
        return Difference(path, "only_left", left, None)
    if isinstance(left, dict) and isinstance(right, dict):
        return _members(path, left, right)
    if isinstance(left, list) and isinstance(right, list):
        return _items(path, left, right)
    return None if _written(left) == _written(right) else Difference(path, "value", left, right)


def _members(path: str, left: Mapping[str, Any], right: Mapping[str, Any]) -> Difference | None:
    for one, other in zip_longest(left, right, fillvalue=_NOTHING):
        if one != other:
            if left.keys() == right.keys():
                return Difference(path, "member_order", list(left), list(right))
            if one is not _NOTHING and one not in right:
                return Difference(f"{path}.{one}", "only_left", left[one], None)  # type: ignore[index]
            return Difference(f"{path}.{other}", "only_right", None, right[other])  # type: ignore[index]
        found = _compare(f"{path}.{one}", left[one], right[one])  # type: ignore[index]
        if found is not None:
            return found
    return None


def _items(path: str, left: Sequence[Any], right: Sequence[Any]) -> Difference | None:
    written, others = [_written(item) for item in left], [_written(item) for item in right]
    if written != others and sorted(written) == sorted(others):
        return Difference(path, "order", [_label(item) for item in left], [_label(item) for item in right])
    for at, (one, other) in enumerate(zip_longest(left, right, fillvalue=_NOTHING)):
        found = _compare(f"{path}[{at}]", one, other)
        if found is not None:
            return found
    return None


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _label(item: Any) -> Any:
    """A tool by its name, so that a list of tools can be read."""
    function = item.get("function") if isinstance(item, dict) else None
    if isinstance(function, dict) and "name" in function:
        return function["name"]
    return item.get("name", item) if isinstance(item, dict) else item
