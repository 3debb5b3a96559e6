"""Does our tokenizer say what the workers' own say? Asked once per life of a worker, when it joins.

A difference (another revision of the model, another template, another option of the engine) would show up later as hits
that never come. It is reported, in the log and on /admin/status, and stops nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from kvrelay.core.model.prompt import TokenIds
from kvrelay.edge.fleet.static import Fleet, UnknownWorker
from kvrelay.edge.gateway.openai import TextPrompt, chat_prompt
from kvrelay.edge.tokens.service import CannotTokenize, Tokenizer
from kvrelay.edge.tokens.worker import ask_worker

_TEXT = "  Ångström & naïve:\r\n\tx = 3.14;  // 漢字 👩‍🔬\n"
_CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "First."}, {"type": "text", "text": " Second? "}]},
    {"role": "assistant", "content": "Yes.\n"},
    {"role": "user", "content": "And now?"},
]
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "parameters": {"type": "object", "properties": {"word": {"type": "string", "description": "<any>"}}},
        },
    }
]

log = logging.getLogger(__name__)


def _chat(**members: object) -> TextPrompt:
    return chat_prompt({name: msgspec.Raw(msgspec.json.encode(value)) for name, value in members.items()})


PROBES: Mapping[str, TextPrompt] = {
    "text": TextPrompt(msgspec.json.encode(_TEXT), {"prompt": _TEXT}, is_chat=False),
    "chat": _chat(messages=_CHAT),
    "tools": _chat(messages=_CHAT, tools=_TOOLS),
}


class Compared(Struct, frozen=True):
    """One probe. `verdict`: same, differs, or unknown when one of the two sides gave no ids."""

    verdict: str
    detail: str | None = None


class Parity:
    """What was found about each worker."""

    def __init__(self, tokenizer: Tokenizer, fleet: Fleet) -> None:
        self._tokenizer = tokenizer
        self._fleet = fleet
        self._found: dict[str, dict[str, Compared]] = {}

    async def check(self, name: str) -> None:
        """Never raises but for cancellation."""
        try:
            found = {probe: await self._compare(name, prompt) for probe, prompt in PROBES.items()}
        except UnknownWorker:
            return  # it left meanwhile
        self._found[name] = found
        for probe, compared in found.items():
            if compared.verdict == "differs":
                log.warning(
                    "worker %s tokenizes otherwise than `tokens.tokenizer` and `tokens.template` do (%s: %s):"
                    " its hits will be misjudged",
                    name,
                    probe,
                    compared.detail,
                )

    def describe(self) -> dict[str, dict[str, Compared]]:
        known = self._fleet.names()
        return {name: found for name, found in self._found.items() if name in known}

    async def _compare(self, name: str, prompt: TextPrompt) -> Compared:
        view = self._fleet.view(name)
        model = view.spec.models[0] if view.spec is not None and view.spec.models else None
        try:
            ours = await self._tokenizer.token_ids(prompt, model)
        except CannotTokenize as reason:
            return Compared("unknown", f"here: {reason}")
        try:
            theirs = await ask_worker(self._fleet, view, prompt.payload, model)
        except CannotTokenize as reason:
            return Compared("unknown", f"worker: {reason.__cause__ or reason}")
        return _compared(ours, theirs)


def _compared(ours: TokenIds, theirs: TokenIds) -> Compared:
    if np.array_equal(ours, theirs):
        return Compared("same")
    common = min(len(ours), len(theirs))
    unequal = np.flatnonzero(ours[:common] != theirs[:common])
    first = int(unequal[0]) if len(unequal) else common
    return Compared("differs", f"from token {first} on, {len(ours)} tokens here and {len(theirs)} there")


def describe_tokens(tokenizer: Tokenizer, parity: Parity | None) -> dict[str, Any]:
    """The part of /admin/status about tokens."""
    about = dict(tokenizer.describe())
    if parity is not None:
        about["parity"] = parity.describe()
    return about
