"""Three workloads, as plans: what is sent, when at the earliest, after what. The same for every policy.

**Sessions.** 14 sessions of 5 turns; groups of them share 4 system prompts, and every turn repeats all before it. The
working set (about 29,000 tokens) fits into two caches of 20,480 tokens, and not into one.

**Hot prefix.** 72 requests, each sent once; 82 % of them begin with the same 1,150 tokens.

**Burst.** Eight requests at the same moment with one new prefix of 2,000 tokens.

`pace` 1 is for a worker that prefills a thousand tokens per second. What a policy is worth shows under load, so the
pace follows the workers (`LOAD`): at any speed of theirs, two of them just keep up with what is left to compute when
the caches are used as well as they can be, and every token that is computed twice is one that others wait for.
"""

from __future__ import annotations

import random

import numpy as np

from kvrelay.core.model.prompt import TokenIds
from kvrelay.core.traces.plan import Plan, PlannedSession, PlannedTurn

VOCABULARY_TOKENS = 256  # every model has these ids
SESSIONS, TURNS, GROUPS = 14, 5, 4
SHORTEST, LONGEST = 560, 2_315  # tokens of a prompt
SYSTEM_TOKENS = 448
ANSWER_TOKENS = 4
START_GAP_MS, THINK_MS = 2_000.0, 5_000.0
LOAD = 4.0  # pace for each thousand tokens that a worker prefills in a second

HOT_REQUESTS, HOT_SHARE, HOT_TOKENS, COLD_TOKENS, HOT_GAP_MS = 72, 0.82, 1_150, 400, 600.0
BURST, BURST_TOKENS = 8, 2_000


def sessions(seed: int, pace: float) -> Plan:
    """Groups of 4, 4, 3 and 3 sessions, which come in any order."""
    chance = random.Random(seed)
    group_of = [number % GROUPS for number in range(SESSIONS)]
    chance.shuffle(group_of)
    systems = [tokens(chance, SYSTEM_TOKENS) for _ in range(GROUPS)]
    planned = []
    for number in range(SESSIONS):
        history = np.concatenate([systems[group_of[number]], tokens(chance, LONGEST - SYSTEM_TOKENS)])
        turns = tuple(_turn(history[: _length(at)], chance, pace, first=at == 0, number=number) for at in range(TURNS))
        planned.append(PlannedSession(f"s{number}", turns))
    return Plan(tuple(planned), seed)


def hot_prefix(seed: int, pace: float) -> Plan:
    chance = random.Random(seed)
    hot = tokens(chance, HOT_TOKENS)
    kinds = [True] * round(HOT_REQUESTS * HOT_SHARE)
    kinds += [False] * (HOT_REQUESTS - len(kinds))
    chance.shuffle(kinds)
    planned = []
    for number, is_hot in enumerate(kinds):
        own = tokens(chance, chance.randrange(40, 160))
        head = hot if is_hot else tokens(chance, COLD_TOKENS)
        turn = PlannedTurn(number * HOT_GAP_MS / pace, 0.0, np.concatenate([head, own]), ANSWER_TOKENS)
        planned.append(PlannedSession(f"{'hot' if is_hot else 'cold'}-{number}", (turn,)))
    return Plan(tuple(planned), seed)


def burst(seed: int, pace: float) -> Plan:
    chance = random.Random(seed)
    head = tokens(chance, BURST_TOKENS)
    turns = [PlannedTurn(0.0, 0.0, np.concatenate([head, tokens(chance, 40)]), ANSWER_TOKENS) for _ in range(BURST)]
    return Plan(tuple(PlannedSession(f"b{number}", (turn,)) for number, turn in enumerate(turns)), seed)


def _length(turn: int) -> int:
    return SHORTEST + (LONGEST - SHORTEST) * turn // (TURNS - 1)


def _turn(token_ids: TokenIds, chance: random.Random, pace: float, *, first: bool, number: int) -> PlannedTurn:
    think_ms = THINK_MS / pace * chance.uniform(0.6, 1.4)
    return PlannedTurn(number * START_GAP_MS / pace if first else 0.0, think_ms, token_ids, ANSWER_TOKENS)


def tokens(chance: random.Random, count: int) -> TokenIds:
    """Token ids of a made-up text."""
    return np.array([chance.randrange(VOCABULARY_TOKENS) for _ in range(count)], dtype=np.uint32)
