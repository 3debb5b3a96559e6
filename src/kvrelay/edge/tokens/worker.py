"""Token ids from the workers themselves: always as the engine sees them, at the price of a question per new text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvrelay.core.model.prompt import TokenIds
from kvrelay.edge.connectors.base import WorkerAnswerUnusable, WorkerUnreachable
from kvrelay.edge.fleet.static import Fleet
from kvrelay.edge.fleet.view import WorkerView
from kvrelay.edge.gateway.openai import TextPrompt
from kvrelay.edge.tokens.service import CannotTokenize


class WorkerTokenizer:
    """Asks a worker that serves the model, each in turn."""

    revision = 0

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._turn = 0

    def at_once(self, prompt: TextPrompt) -> TokenIds | None:
        return None

    async def token_ids(self, prompt: TextPrompt, model: str | None) -> TokenIds:
        return await ask_worker(self._fleet, self._someone(model), prompt.payload, model)

    def describe(self) -> Mapping[str, Any]:
        return {"tokenizer": "worker", "cache": "off", "why": "no `tokens.tokenizer` is set: the workers are asked"}

    def close(self) -> None:
        return

    def _someone(self, model: str | None) -> WorkerView:
        # one that has said who it is may be asked before its first probe is answered: it is routed to by then
        able = [view for view in self._fleet.views() if view.last_probe_ok is not False and _serves(view, model)]
        if not able:
            raise CannotTokenize("no_tokenizer")
        self._turn += 1
        return able[self._turn % len(able)]


async def ask_worker(fleet: Fleet, view: WorkerView, payload: Mapping[str, Any], model: str | None) -> TokenIds:
    """Raises CannotTokenize, with what the connector said as its cause."""
    assert view.connector is not None, view.name
    question = dict(payload) if model is None else {"model": model, **payload}
    try:
        return await view.connector.tokenize(fleet.session_of(view.name), view.url, question, view.headers)
    except WorkerUnreachable as error:
        raise CannotTokenize("tokenizer_unreachable") from error
    except WorkerAnswerUnusable as error:
        raise CannotTokenize("tokenizer_refused") from error


def _serves(view: WorkerView, model: str | None) -> bool:
    if view.connector is None or view.spec is None:
        return False
    names = (*view.spec.models, *view.spec.adapters)
    return model is None or not names or model in names
