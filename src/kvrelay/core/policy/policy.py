"""What a policy sees and what it answers. Policies are siblings with one outline: `name`, `needs_match`, `choose`.

A policy is given the candidates that passed the filters (alive, not draining, model, role, capacity); it ranks them and
does nothing else. All arrays are parallel to `Field.slots`, so a fleet of hundreds costs a few numpy calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from msgspec import Struct

from kvrelay.core.load.ledger import ACTIVE, FOREIGN, PREFILL, RECENT, Ledger
from kvrelay.core.model.arrays import Floats, Ints
from kvrelay.core.model.units import RouteReason


class Arrays(Struct, frozen=True, eq=False):
    """What scorers calculate with; all parallel to `Field.slots`."""

    ready_tokens: Floats  # reusable at once: in the fastest tier, or being computed there now
    reachable_tokens: Floats  # the same and what lies in lower tiers
    transfer_ms: Floats | None  # estimated, for loading what is reachable and not ready; None: nothing is
    load: Floats  # one row per kind, as `ledger.KINDS` and `ledger.RECENT`, one column per candidate
    backlog_tokens: Floats | None  # prefill booked there and, by the learned rate, not computed yet; None: none is
    prefill_tokens_per_s: Floats  # learned rates
    foreign_prefill_tokens: float  # what each request that we did not book is presumed to need; 0: there is none
    prompt_tokens: int
    block_size_tokens: int  # the unit in which the `weights` scorer counts blocks


class Bound(Struct, frozen=True, eq=False):
    """What a session's binding says about this request."""

    slot: int | None = None  # the candidate to return to
    broken: RouteReason | None = None  # why there is none, although the session is bound or was
    away_from: int | None = None  # the slot that it stays bound to, wherever this request goes
    second_slot: int | None = None  # the candidate that took its last excursion


NOT_BOUND = Bound()


class Field(Struct, frozen=True, eq=False):
    """The candidates for one request."""

    slots: Ints  # ascending
    scored: bool  # False: no keys for this prompt
    index_usable: bool  # False: no candidate's index could ever match
    bound: Bound
    has_session: bool
    draw: int
    arrays: Arrays | None = None  # for policies that calculate


class Choice(Struct, frozen=True, eq=False):
    """The chosen slot and the arithmetic behind it.

    `scores` are parallel to `Field.slots`; `terms_of(i)` are the named summands of `scores[i]`, worked out only for the
    few candidates that a receipt shows.
    """

    slot: int
    reason: RouteReason
    scores: Floats | None = None
    terms_of: Callable[[int], Mapping[str, float]] | None = None
    best_is_lowest: bool = False
    spilled_from: int | None = None  # slot of the worker that was too busy


class Policy(Protocol):
    """Chooses one of the candidates; `field.slots` is never empty."""

    name: str
    needs_match: bool  # worth tokenizing a text for
    needs_arrays: bool  # calculates over all candidates
    binds_sessions: bool

    def choose(self, now: float, field: Field, ledger: Ledger) -> Choice: ...


def break_tie(positions: Ints, field: Field) -> int:
    """Of equally good candidates the one with fewest requests, then least work placed lately, then by the draw."""
    assert field.arrays is not None
    load = field.arrays.load
    if len(positions) > 1:
        requests = load[ACTIVE].take(positions) + load[FOREIGN].take(positions)
        positions = positions[requests == requests[requests.argmin()]]
    if len(positions) > 1:
        recent = load[RECENT].take(positions)
        positions = positions[recent == recent[recent.argmin()]]
    return int(positions[field.draw % len(positions)])


def requests_in_hand(field: Field) -> Floats:
    """Per candidate: what we sent there, and what it reported beyond that."""
    assert field.arrays is not None
    requests: Floats = field.arrays.load[ACTIVE] + field.arrays.load[FOREIGN]
    return requests


def least_busy(field: Field, requests: Floats) -> Ints:
    """Positions with the fewest requests in hand; among those, the smallest backlog of prefill tokens."""
    assert field.arrays is not None
    fewest = (requests == requests.min()).nonzero()[0]
    backlog = field.arrays.load[PREFILL].take(fewest)
    lightest: Ints = fewest[backlog == backlog.min()]
    return lightest
