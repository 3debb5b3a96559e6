"""What a replay puts on the wire: one streaming request per turn, in one of three forms."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np

from kvrelay.core.model.prompt import TokenIds
from kvrelay.core.traces.words import text_of

Form = Literal["token_ids", "text", "chat"]

PATHS: dict[str, str] = {"token_ids": "/v1/completions", "text": "/v1/completions", "chat": "/v1/chat/completions"}
"""Token ids are exact and need no tokenizer. Text and chat are for targets that do not take them."""


def request_body(
    model: str, token_ids: TokenIds, max_tokens: int, *, form: Form = "token_ids", cache_salt: str | None = None
) -> bytes:
    """A request that takes exactly `max_tokens` tokens and reports its usage. A salt keeps it from all other caches."""
    members: dict[str, Any] = {} if cache_salt is None else {"cache_salt": cache_salt}
    members["model"] = model
    if form == "chat":
        members["messages"] = [{"role": "user", "content": text_of(token_ids)}]
    else:
        members["prompt"] = np.asarray(token_ids).tolist() if form == "token_ids" else text_of(token_ids)
    members |= {
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return msgspec.json.encode(members)
