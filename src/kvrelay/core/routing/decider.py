"""One decision: match the prompt, lay out the candidates, let the policy choose. Changes only the policy's turn."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from kvrelay.core.index.matches import FEW_SLOTS, ArrayMatches, FewMatches, Matches, match_prompt
from kvrelay.core.load.growth import Conversation
from kvrelay.core.load.ledger import PREFILL, Ledger
from kvrelay.core.load.prefill_rate import remaining_tokens
from kvrelay.core.model.arrays import Floats, Ints
from kvrelay.core.model.events import RequestArrived
from kvrelay.core.model.ids import TargetId
from kvrelay.core.model.units import RouteReason
from kvrelay.core.policy.first_token import first_token_ms, first_token_ms_of_many
from kvrelay.core.policy.policy import NOT_BOUND, Arrays, Bound, Field, Policy, Row
from kvrelay.core.routing.affinity import Session
from kvrelay.core.routing.fleet import FleetView
from kvrelay.core.routing.keeper import Keeper
from kvrelay.core.routing.live import Decision

_NO_MATCHES = FewMatches([0] * FEW_SLOTS, [0] * FEW_SLOTS, {})
# Until transfer rates are learned per tier: milliseconds to load one token's KV.
TRANSFER_MS_PER_TOKEN = {"cpu": 0.002, "disk": 0.01, "remote": 0.02, "peer": 0.02}


class Decider:
    """Reads fleet, index and ledger; owns none of them."""

    def __init__(self, *, fleet: FleetView, keeper: Keeper, ledger: Ledger) -> None:
        self._fleet = fleet
        self._keeper = keeper
        self._ledger = ledger

    def decide(
        self, now: float, policy: Policy, arrived: RequestArrived, slots: Ints, session: Session | None
    ) -> Decision:
        """Choose among `slots`, which must not be empty. `session`: that of the request, if sessions are bound."""
        matches = self._match(arrived)
        continues = self._continues(arrived, matches) if policy.needs_match and matches is not None else None
        field = self._field(now, policy, arrived, slots, matches, session, continues)
        choice = policy.choose(now, field, self._ledger)
        target = self._fleet.at(choice.slot)
        spec = self._fleet.workers[target.id.worker.name].spec
        return Decision(
            policy=policy.name,
            field=field,
            choice=choice,
            at=bisect_left(slots.data, choice.slot),  # numpy's own would first make an array of the slot
            chosen_load=self._ledger.slots[choice.slot].kinds(),
            chosen_rate=self._ledger.rates.of(choice.slot),
            claimed_tokens=0 if matches is None else matches.at(choice.slot).reachable(),
            target=target.id,
            slot=choice.slot,
            engine=spec.engine,
            models_payload=spec.models_payload,
            index_state=target.index_state,
            matches=matches,
            continues=continues,
            load_version=self._ledger.version,
            targets=self._fleet.targets,
        )

    def first_token_ms(self, now: float, arrived: RequestArrived, decision: Decision) -> list[float]:
        """When the first token is to be expected at each candidate of the decision; parallel to its slots."""
        field, matches = decision.field, decision.matches
        if field.rows is not None or (field.arrays is None and len(self._fleet.targets) <= FEW_SLOTS):
            rows = field.rows or self._rows(now, arrived, field.slots.tolist(), matches, decision.continues)
            return [first_token_ms(row) for row in rows]
        arrays = field.arrays or self._arrays(now, arrived, field.slots, matches, decision.continues)
        expected: list[float] = first_token_ms_of_many(arrays).tolist()
        return expected

    def _match(self, arrived: RequestArrived) -> Matches | None:
        if not arrived.prompt.keys:
            return None
        return match_prompt(
            arrived.prompt,
            residency=self._keeper.residency,
            in_flight=self._keeper.in_flight,
            sizes=self._fleet.block_sizes,
            slots=len(self._fleet.targets),
        )

    def _field(
        self,
        now: float,
        policy: Policy,
        arrived: RequestArrived,
        slots: Ints,
        matches: Matches | None,
        session: Session | None,
        continues: Conversation | None,
    ) -> Field:
        few = policy.takes_rows and len(self._fleet.targets) <= FEW_SLOTS
        return Field(
            slots=slots,
            scored=arrived.prompt.scorable,
            index_usable=not policy.needs_match or self._index_usable(slots),
            bound=self._bound(now, session, slots) if policy.binds_sessions else NOT_BOUND,
            has_session=arrived.session_id is not None,
            draw=arrived.draw,
            arrays=self._arrays(now, arrived, slots, matches, continues) if policy.needs_arrays and not few else None,
            rows=self._rows(now, arrived, slots.tolist(), matches, continues) if few else None,
        )

    def _continues(self, arrived: RequestArrived, matches: Matches) -> Conversation | None:
        """The conversation that the prompt goes on with, as far as anybody can tell."""
        size, keys = next(iter(arrived.prompt.keys.items()))
        return self._ledger.growth.continues(keys, matches.best() // size)

    def _rows(
        self,
        now: float,
        arrived: RequestArrived,
        slots: list[int],
        matches: Matches | None,
        continues: Conversation | None,
    ) -> tuple[Row, ...]:
        ledger, rates = self._ledger, self._ledger.rates
        prompt_tokens = arrived.prompt.prompt_tokens or 0
        foreign_tokens = ledger.mean_prefill_tokens(prompt_tokens) if ledger.foreign_requests else 0.0
        block_size = self._fleet.block_sizes[0] if self._fleet.block_sizes else 1
        few = _NO_MATCHES if matches is None else matches
        assert isinstance(few, FewMatches), "rows are made of few slots only"
        if matches is None or few.promised():  # who comes with what is being computed waits there
            growth = [0.0] * len(slots)
        else:
            growth = ledger.growth.expected_tokens(
                now, slots, continues, reachable=[few.reachable[slot] for slot in slots], prompt_tokens=prompt_tokens
            )
        rows, hop_ms = [], self._fleet.hop_ms
        for slot, growth_tokens, tokens_per_s in zip(slots, growth, rates.of_each(slots), strict=True):
            load = ledger.slots[slot]
            active, queued, backlog, decode_blocks, foreign = load.kinds()
            rows.append(
                Row(
                    few.ready[slot],
                    few.reachable[slot],
                    hop_ms[slot] + _loading_ms_of(few, slot) if few.lower else hop_ms[slot],
                    active,
                    queued,
                    backlog,
                    decode_blocks,
                    foreign,
                    load.recent_tokens,
                    rates.remaining(now, slot, backlog) if backlog else 0.0,
                    growth_tokens,
                    tokens_per_s,
                    foreign_tokens,
                    prompt_tokens,
                    block_size,
                )
            )
        return tuple(rows)

    def _arrays(
        self, now: float, arrived: RequestArrived, slots: Ints, matches: Matches | None, continues: Conversation | None
    ) -> Arrays:
        ledger, prompt_tokens = self._ledger, arrived.prompt.prompt_tokens or 0
        load = _of(ledger.table(), slots)
        rates = _own(ledger.rates.expected(), slots)
        found = None if matches is None else matches.arrays()
        ready = np.zeros(len(slots)) if found is None else _own(found.ready, slots)
        lower = found if found is not None and found.lower else None
        reachable = ready if lower is None else _own(lower.reachable(), slots)
        return Arrays(
            ready_tokens=ready,
            reachable_tokens=reachable,
            transfer_ms=self._transfer_ms(lower, slots),
            load=load,
            backlog_tokens=remaining_tokens(load[PREFILL], rates, now - _own(ledger.rates.working_since(), slots))
            if ledger.prefilling_requests or ledger.siblings.prefilling_requests
            else None,
            growth_tokens=None
            if matches is None or matches.promised()
            else ledger.growth.expected_tokens_of_many(
                now, slots, continues, reachable=reachable, prompt_tokens=prompt_tokens
            ),
            prefill_tokens_per_s=rates,
            foreign_prefill_tokens=ledger.mean_prefill_tokens(prompt_tokens) if ledger.foreign_requests else 0.0,
            prompt_tokens=prompt_tokens,
            block_size_tokens=self._fleet.block_sizes[0] if self._fleet.block_sizes else 1,
        )

    def _transfer_ms(self, lower: ArrayMatches | None, slots: Ints) -> Floats | None:
        hop_ms = self._fleet.hop_ms_of_many
        if lower is None:
            return None if hop_ms is None else _own(hop_ms, slots)
        loading_ms = _loading_ms(lower, slots)
        return loading_ms if hop_ms is None else loading_ms + _own(hop_ms, slots)

    def _index_usable(self, slots: Ints) -> bool:
        return any(self._fleet.at(slot).index_broken is None for slot in slots)  # the first is enough

    def _bound(self, now: float, session: Session | None, slots: Ints) -> Bound:
        """Where the session belongs: a candidate's slot, or why its worker cannot be used."""
        if session is None or session.ended:
            return NOT_BOUND
        broken: Bound | None = None
        if session.home is not None:
            slot = self._candidate(session.home, slots)
            if slot is not None:
                return Bound(slot, second_slot=self._candidate(session.second, slots))
            broken = self._broken(now, session.home, self._candidate(session.second, slots))
        proposed = self._candidate(session.proposed, slots)
        if proposed is not None:
            return Bound(proposed)
        if session.lost_home:
            return Bound(broken=RouteReason.AFFINITY_BROKEN_LOST)
        return broken or NOT_BOUND

    def _broken(self, now: float, home: TargetId, second_slot: int | None) -> Bound:
        """Health and draining end a binding. Whatever else is in the way of this request leaves it alone."""
        worker = self._fleet.live(home.worker)
        if worker is None or not worker.health.routable(now):
            return Bound(broken=RouteReason.AFFINITY_BROKEN_UNHEALTHY)
        if worker.leaving:
            return Bound(broken=RouteReason.AFFINITY_BROKEN_UNAVAILABLE)
        home_slot = worker.targets[home.rank].slot
        busy = self._fleet.turns_away(now, home_slot, self._ledger)
        reason = RouteReason.AFFINITY_BROKEN_BUSY if busy else RouteReason.AFFINITY_BROKEN_UNAVAILABLE
        return Bound(broken=reason, away_from=home_slot, second_slot=second_slot)

    def _candidate(self, target_id: TargetId | None, slots: Ints) -> int | None:
        """The slot of this rank, if it is among the candidates."""
        target = None if target_id is None else self._fleet.target(target_id.worker, target_id.rank)
        return target.slot if target is not None and target.slot in slots else None


def _of(array: Floats, slots: Ints) -> Floats:
    """The columns of these slots, as they are now. Usually every slot is a candidate, and a copy is all it takes."""
    picked: Floats = array.copy() if len(slots) == array.shape[-1] else array.take(slots, axis=-1)
    return picked


def _own(array: Floats, slots: Ints) -> Floats:
    """The same of an array that nobody else will change."""
    picked: Floats = array if len(slots) == array.shape[-1] else array.take(slots, axis=-1)
    return picked


def _loading_ms_of(few: FewMatches, slot: int) -> float:
    return sum(tokens[slot] * TRANSFER_MS_PER_TOKEN[tier] for tier, tokens in few.lower.items())


def _loading_ms(matches: ArrayMatches, slots: Ints) -> Floats:
    ms = np.zeros(len(slots))
    for tier, tokens in matches.lower.items():
        ms += tokens.take(slots) * TRANSFER_MS_PER_TOKEN[tier]
    return ms
