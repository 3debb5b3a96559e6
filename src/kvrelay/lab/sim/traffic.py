"""Lets the requests of a trace arrive in virtual time: at their own times, but no turn before the one before it ended.

Prompts are made when they are due and not kept, so a trace of a hundred million tokens fits into little memory. One
block of the trace is one block of the engine, so token counts are the trace's own.
"""

from __future__ import annotations

from functools import partial

from kvrelay.core.cachesim.prefix_trace import request_sessions
from kvrelay.core.receipts.receipt import Receipt
from kvrelay.core.traces.synth import PromptSynth
from kvrelay.core.traces.trace import Session, Trace, arrivals
from kvrelay.lab.sim.world import SimRequest, World


class Traffic:
    """`start` puts the first turn of every session on the agenda; the others follow the receipts."""

    def __init__(self, world: World, trace: Trace, *, seed: int, max_output_tokens: int) -> None:
        self._world = world
        self._trace = trace
        self._synth = PromptSynth.of(trace, seed=seed, block_tokens=trace.block_size_tokens)
        self._max_output_tokens = max_output_tokens
        self._turn_of: dict[str, tuple[Session, int]] = {}
        self._named = self._session_names()

    def start(self) -> None:
        self._world.promised += self._trace.requests
        self._world.on_receipt = self._ended
        for session in self._trace.sessions:
            if session.turns:
                self._put_down(session, 0)

    def _session_names(self) -> dict[tuple[str, int], str]:
        """The session that the router is told, per session of the trace and turn."""
        counted: dict[str, int] = {}
        names: dict[tuple[str, int], str] = {}
        for arrival, name in zip(arrivals(self._trace), request_sessions(self._trace), strict=True):
            own = arrival.session.session_id
            turn = counted.get(own, 0)
            counted[own] = turn + 1
            names[own, turn] = name
        return names

    def _put_down(self, session: Session, turn: int) -> None:
        due_s = (session.start_ms + session.turns[turn].due_ms) / 1000
        self._world.at(due_s, partial(self._send, session, turn))

    def _send(self, session: Session, index: int) -> None:
        request_id = f"{session.session_id}#{index}"
        self._turn_of[request_id] = (session, index)
        turn = session.turns[index]
        self._world.promised -= 1
        self._world.submit(
            self._world.now_s,
            SimRequest(
                request_id=request_id,
                token_ids=self._synth.prompt(self._trace, session, index),
                max_tokens=max(1, min(turn.output_tokens, self._max_output_tokens)),
                session_id=self._named[session.session_id, index],
            ),
        )

    def _ended(self, receipt: Receipt) -> None:
        session, index = self._turn_of.pop(receipt.request_id)
        following = index + 1
        if following < len(session.turns):
            ready_s = self._world.now_s + session.turns[following].think_ms / 1000
            due_s = (session.start_ms + session.turns[following].due_ms) / 1000
            self._world.at(max(ready_s, due_s), partial(self._send, session, following))
