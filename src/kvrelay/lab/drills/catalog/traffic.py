"""Requests that drills are made of."""

from __future__ import annotations

import random

from kvrelay.lab.drills.drill import Turn
from kvrelay.lab.drills.prompts import Text, text

PROMPT_TOKENS = 330  # and 48 a turn: never whole blocks, so that repeating a prompt stores nothing new


def conversation(session: str, seed: int, turns: int, *, first: int = 0, every_s: float = 0.0) -> tuple[Turn, ...]:
    """Turns `first` to `first + turns - 1` of a session, each with the ones before it as its prefix."""
    return tuple(
        Turn(
            id=f"{session}-{number + 1}",
            text=history(seed, number + 1),
            session=session,
            at_s=every_s * (number - first),
        )
        for number in range(first, first + turns)
    )


def history(seed: int, turns: int) -> Text:
    """The prompt of a conversation's turn of that number."""
    said = text(seed, PROMPT_TOKENS)
    for number in range(1, turns):
        said = said.then(seed * 1000 + number, 48)
    return said


def crowd(
    name: str,
    count: int,
    *,
    seed: int,
    over_s: float,
    tokens: int = 160,
    max_tokens: int = 4,
    shared: Text | None = None,
    shared_share: float = 0.0,
) -> tuple[Turn, ...]:
    """`count` clients with prompts of their own, evenly spread in time; a share of them begins with `shared`.

    The share is exact, its places are drawn.
    """
    places = list(range(count))
    random.Random(seed).shuffle(places)
    sharing = set(places[: round(count * shared_share)])
    turns = []
    for number in range(count):
        own = seed * 100_000 + number
        begun = shared if shared is not None and number in sharing else None
        said = text(own, tokens) if begun is None else begun.then(own, max(16, tokens // 4))
        turns.append(Turn(id=f"{name}-{number}", text=said, at_s=over_s * number / count, max_tokens=max_tokens))
    return tuple(turns)


def repeated(name: str, texts: tuple[Text, ...], *, times: int, every_s: float = 0.01) -> tuple[Turn, ...]:
    """Known prompts again and again, each in a session of its own."""
    return tuple(
        Turn(id=f"{name}-{turn}-{number}", text=said, at_s=every_s * (turn * len(texts) + number))
        for turn in range(times)
        for number, said in enumerate(texts)
    )
