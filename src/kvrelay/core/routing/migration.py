"""May a stream that broke go on at another worker? Only on request (`retry.migrate`), and only where it cannot show.

A migration is an attempt like any other: bounded per request, paid from the budget for retries, never on a worker that
the request was on before. What the client has got stays; the next worker gets the prompt and what was generated of the
answer, and its stream is joined to the first one's by the host, who alone knows whether that can be done unseen.
"""

from __future__ import annotations

from kvrelay.core.model.events import AttemptFailed, CannotGoOn
from kvrelay.core.model.units import Fault


def hindrance(event: AttemptFailed) -> str | None:
    """Why the answer of this attempt, a part of which went to the client, cannot be continued; None: it can."""
    if event.fault is Fault.NOT_CONTINUED:  # workers of one fleet would say the same one after the other
        return Fault.NOT_CONTINUED.value
    match event.rest:
        case None:
            return "not_followed"
        case CannotGoOn(because=because):
            return because
    return None
