"""Continuous batching: what one engine step computes, decided in vLLM's order.

Sequences that already run come first and in order of admission, so decodes precede the rest of a chunked prefill;
what is left of the token budget admits waiting sequences, first come first served. When blocks run out, the youngest
running sequence is preempted: it gives everything back and is computed again later (its prefix may still be cached by
then).
"""

from __future__ import annotations

from collections import deque

from msgspec import Struct

from kvrelay.core.engine.kvcache import KvCache
from kvrelay.core.engine.sequence import Sequence


class SchedulerLimits(Struct, frozen=True):
    """Bounds of one step."""

    token_budget: int = 2048
    max_num_seqs: int = 128


class Plan(Struct):
    """One step: sequences with the number of tokens that each computes."""

    parts: list[tuple[Sequence, int]]
    admitted: list[Sequence]
    preempted: list[Sequence]
    prefill_tokens: int = 0
    decode_requests: int = 0

    def add(self, sequence: Sequence, tokens: int) -> None:
        if sequence.decoding:
            self.decode_requests += 1
        else:
            self.prefill_tokens += tokens
        self.parts.append((sequence, tokens))


class Scheduler:
    """Waiting and running sequences of one engine."""

    def __init__(self, cache: KvCache, limits: SchedulerLimits) -> None:
        self._cache = cache
        self._limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def submit(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def end(self, sequence: Sequence) -> None:
        """The sequence is finished or aborted: its blocks are free at once."""
        sequence.ended = True
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._cache.release(sequence)

    def plan(self) -> Plan:
        """Choose the next step and allocate for it. An empty plan means there is nothing to do.

        A step that preempts admits nobody: the victim is first in line, and what it gave back is partly taken.
        """
        plan = Plan(parts=[], admitted=[], preempted=[])
        budget = self._continue_running(plan, self._limits.token_budget)
        self._admit_waiting(plan, budget)
        return plan

    def _continue_running(self, plan: Plan, budget: int) -> int:
        position = 0
        while position < len(self.running) and budget > 0:
            sequence = self.running[position]
            tokens = min(sequence.tokens_to_compute, budget)
            if not self._make_room(plan, sequence, tokens):
                break
            self._cache.write(sequence, tokens)
            plan.add(sequence, tokens)
            budget -= tokens
            position += 1
        return budget

    def _make_room(self, plan: Plan, sequence: Sequence, tokens: int) -> bool:
        """Blocks for the sequence, taken from younger ones if need be; False when it had to give way itself."""
        while not self._cache.reserve(sequence, tokens):
            victim = self.running.pop()
            self._cache.release(victim)
            victim.preemptions += 1
            self.waiting.appendleft(victim)
            plan.preempted.append(victim)
            if victim is sequence:
                return False
        return True

    def _admit_waiting(self, plan: Plan, budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self._limits.max_num_seqs:
            sequence = self.waiting[0]
            hits = self._cache.reusable(sequence)
            if not self._cache.fits_whole(sequence, hits):
                break
            self._cache.attach(sequence, hits)
            tokens = min(sequence.tokens_to_compute, budget)
            reserved = self._cache.reserve(sequence, tokens)
            assert reserved, f"{sequence.request.request_id} fits whole but not in part"
            self._cache.write(sequence, tokens)
            self.waiting.popleft()
            self.running.append(sequence)
            plan.admitted.append(sequence)
            plan.add(sequence, tokens)
            budget -= tokens

    def check(self) -> None:
        """Invariants of both queues and of the pool under them."""
        held = [block for sequence in self.running for block in sequence.blocks]
        self._cache.pool.check(held)
        for sequence in self.running:
            assert not sequence.ended and sequence.tokens_to_compute > 0, f"{sequence.request.request_id} is idle"
        for sequence in self.waiting:
            assert not sequence.ended and not sequence.blocks, f"{sequence.request.request_id} waits with blocks"
        assert len(self.running) <= self._limits.max_num_seqs
