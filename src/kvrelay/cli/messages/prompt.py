"""What `kvrelay prompt` says."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvrelay.core.contract.same_prefix import Parting
    from kvrelay.edge.tokens.request_difference import Difference

_SHOWN_CHARS = 160


def no_tokenizer() -> str:
    return (
        "error: these prompts are text, and nothing says how it becomes tokens\n"
        "  legal: --tokenizer FILE (and --template FILE for chats), [tokens] of a configuration (-c), or --worker URL\n"
        "hint: kvrelay prompt diff A.json B.json --worker http://127.0.0.1:8100"
    )


def not_tokenized(file: object, reason: str) -> str:
    return f"unknown: the tokens of `{file}` cannot be known: {reason.replace('_', ' ')}"


def not_a_request(file: object, reason: str) -> str:
    return f"error: `{file}` is no request: {reason}\n  legal: one JSON object with `messages` or `prompt`"


def diff(found: Parting, because: Difference | None, texts: tuple[str | None, str | None]) -> str:
    if found.at_token is None:
        said = f"same prefix: one prompt begins with all {found.shared_tokens:,} tokens of the other"
        return f"{said}; {_blocks(found)}\n"
    lines = [f"first differing token: {found.at_token:,} (of {found.left_tokens:,} and {found.right_tokens:,})"]
    for side, text in zip("AB", texts, strict=True):
        if text is not None:
            lines.append(f"  {side}: {json.dumps(text, ensure_ascii=False)}")
    lines.append(_blocks(found))
    if because is not None:
        lines += ["because: " + _because(because), *_sides(because)]
    return "\n".join(lines) + "\n"


def _blocks(found: Parting) -> str:
    total = min(found.left_tokens, found.right_tokens) // found.block_size_tokens
    return f"{found.shared_blocks:,} of {total:,} blocks of {found.block_size_tokens} tokens can be shared"


def _because(difference: Difference) -> str:
    match difference.kind:
        case "order":
            return f"`{difference.path}` has the same items in another order"
        case "member_order":
            return f"`{difference.path}` has the same members in another order"
        case "only_left":
            return f"`{difference.path}` is in A only"
        case "only_right":
            return f"`{difference.path}` is in B only"
        case _:
            return f"`{difference.path}` has another value"


def _sides(difference: Difference) -> list[str]:
    return [
        f"  {side}: {_cut(value)}"
        for side, value in (("A", difference.left), ("B", difference.right))
        if value is not None
    ]


def _cut(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
