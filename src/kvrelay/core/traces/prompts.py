"""A trace with its prompts made: what any load generator can send."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec
import numpy as np

from kvrelay.core.traces.plan import Plan
from kvrelay.core.traces.words import text_of

PromptForm = Literal["tokens", "text", "chat"]


def prompt_rows(plan: Plan, form: PromptForm) -> Iterator[bytes]:
    """One JSON object per request, session by session; the same plan and form give the same bytes."""
    for session in plan.sessions:
        for number, turn in enumerate(session.turns):
            row: dict[str, object] = {"session_id": session.session_id, "turn": number}
            row |= {"due_ms": turn.due_ms, "think_ms": turn.think_ms, "max_tokens": turn.max_tokens}
            if form == "tokens":
                row["prompt"] = np.asarray(turn.token_ids).tolist()
            elif form == "text":
                row["prompt"] = text_of(turn.token_ids)
            else:
                row["messages"] = [{"role": "user", "content": text_of(turn.token_ids)}]
            yield msgspec.json.encode(row)
