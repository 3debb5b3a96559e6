"""What a policy sees and what it answers. Policies are siblings with one outline: `name`, `needs_match`, `choose`.

A policy is given the candidates that passed the filters (alive, not draining, model, role, capacity); it ranks them and
does nothing else. All arrays are parallel to `Field.slots`, so a fleet of hundreds costs a few numpy calls. In a small
fleet those calls would be the larger part of a decision: a policy that says so gets `Row`s of plain numbers there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from kvrelay.core.load.ledger import ACTIVE, FOREIGN, PREFILL, RECENT, Ledger
from kvrelay.core.model.arrays import Floats, Ints
from kvrelay.core.model.units import RouteReason


class Row(Struct, frozen=True):
    """What scorers know of one candidate."""

    ready_tokens: float  # reusable at once: in the fastest tier, or being computed there now
    reachable_tokens: float  # the same and what lies in lower tiers
    transfer_ms: float  # estimated, for loading what is reachable and not ready, and for the way to the worker
    active: float  # requests, and so on as `ledger.KINDS`
    queued: float
    prefill_tokens: float
    decode_blocks: float
    foreign: float
    recent_tokens: float
    backlog_tokens: float  # prefill booked there and, by the learned rate, not computed yet
    growth_tokens: float  # what the conversations that live there will still bring
    prefill_tokens_per_s: float  # learned
    foreign_prefill_tokens: float  # what each request that we did not book is presumed to need
    prompt_tokens: int
    block_size_tokens: int  # the unit in which the `weights` scorer counts blocks


class Arrays(Struct, frozen=True, eq=False):
    """The same of many candidates; all parallel to `Field.slots`."""

    ready_tokens: Floats  # reusable at once: in the fastest tier, or being computed there now
    reachable_tokens: Floats  # the same and what lies in lower tiers
    transfer_ms: Floats | None  # estimated, as in `Row`; None: there is none
    load: Floats  # one row per kind, as `Ledger.table`, one column per candidate
    backlog_tokens: Floats | None  # prefill booked there and, by the learned rate, not computed yet; None: none is
    growth_tokens: Floats | None  # what the conversations that live there will still bring; None: nothing is known
    prefill_tokens_per_s: Floats  # learned rates
    foreign_prefill_tokens: float  # what each request that we did not book is presumed to need; 0: there is none
    prompt_tokens: int
    block_size_tokens: int  # the unit in which the `weights` scorer counts blocks

    def row(self, at: int) -> Row:
        """One candidate of them."""
        active, queued, prefill, decode, foreign, recent, _ = self.load[:, at].tolist()
        return Row(
            ready_tokens=float(self.ready_tokens[at]),
            reachable_tokens=float(self.reachable_tokens[at]),
            transfer_ms=0.0 if self.transfer_ms is None else float(self.transfer_ms[at]),
            active=active,
            queued=queued,
            prefill_tokens=prefill,
            decode_blocks=decode,
            foreign=foreign,
            recent_tokens=recent,
            backlog_tokens=0.0 if self.backlog_tokens is None else float(self.backlog_tokens[at]),
            growth_tokens=0.0 if self.growth_tokens is None else float(self.growth_tokens[at]),
            prefill_tokens_per_s=float(self.prefill_tokens_per_s[at]),
            foreign_prefill_tokens=self.foreign_prefill_tokens,
            prompt_tokens=self.prompt_tokens,
            block_size_tokens=self.block_size_tokens,
        )


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
    arrays: Arrays | None = None  # for policies that calculate,
    rows: tuple[Row, ...] | None = None  # or this, for those that take rows where there are few

    def row(self, at: int) -> Row | None:
        """What the policy saw of one candidate, if it calculates."""
        if self.rows is not None:
            return self.rows[at]
        return None if self.arrays is None else self.arrays.row(at)


class Choice(Struct, frozen=True, eq=False):
    """The chosen slot and the arithmetic behind it.

    `scores` are parallel to `Field.slots`; `terms_of(field.row(i))` are the named summands of `scores[i]`, worked out
    only for the few candidates that a receipt shows.
    """

    slot: int
    reason: RouteReason
    scores: Sequence[float] | Floats | None = None
    terms_of: Callable[[Row], Mapping[str, float]] | None = None
    best_is_lowest: bool = False
    spilled_from: int | None = None  # slot of the worker that was too busy


class Policy(Protocol):
    """Chooses one of the candidates; `field.slots` is never empty."""

    name: str
    needs_match: bool  # worth tokenizing a text for
    needs_arrays: bool  # calculates over all candidates
    takes_rows: bool  # calculates with `Field.rows` where there are few
    binds_sessions: bool

    def choose(self, now: float, field: Field, ledger: Ledger) -> Choice: ...


def break_tie(positions: Ints, field: Field) -> int:
    """Of equally good candidates the one with fewest requests, then the nearest, then the one with least work placed
    lately, then by the draw."""
    assert field.arrays is not None
    load = field.arrays.load
    if len(positions) > 1:
        requests = load[ACTIVE].take(positions) + load[FOREIGN].take(positions)
        positions = positions[requests == requests[requests.argmin()]]
    if len(positions) > 1 and field.arrays.transfer_ms is not None:
        far = field.arrays.transfer_ms.take(positions)
        positions = positions[far == far[far.argmin()]]
    if len(positions) > 1:
        recent = load[RECENT].take(positions)
        positions = positions[recent == recent[recent.argmin()]]
    return int(positions[field.draw % len(positions)])


def break_tie_of_few(positions: Sequence[int], rows: Sequence[Row], draw: int) -> int:
    """The same over rows."""
    burdens = [(rows[at].active + rows[at].foreign, rows[at].transfer_ms, rows[at].recent_tokens) for at in positions]
    lightest = min(burdens)
    tied = [at for at, burden in zip(positions, burdens, strict=True) if burden == lightest]
    return tied[draw % len(tied)]


def requests_in_hand(field: Field) -> Floats:
    """Per candidate: what we sent there, and what it reported beyond that."""
    assert field.arrays is not None
    requests: Floats = field.arrays.load[ACTIVE] + field.arrays.load[FOREIGN]
    return requests


def requests_term(row: Row) -> Mapping[str, float]:
    """The same of one candidate, as the only summand of its score."""
    return {"requests": row.active + row.foreign}


def least_busy(field: Field, requests: Floats) -> Ints:
    """Positions with the fewest requests in hand; among those, the smallest backlog of prefill tokens."""
    assert field.arrays is not None
    fewest = (requests == requests.min()).nonzero()[0]
    backlog = field.arrays.load[PREFILL].take(fewest)
    lightest: Ints = fewest[backlog == backlog.min()]
    return lightest
