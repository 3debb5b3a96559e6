"""Traces that are made, not recorded: small loads whose reuse is known beforehand.

They are named like files (`preset:NAME`) and need no data. All numbers that define one are in `parameters`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from kvrelay.core.traces.draw import Draw
from kvrelay.core.traces.trace import GLOBAL_SCOPE, Session, Trace, Turn

PREFIX = "preset:"
BLOCK_TOKENS = 16

Preparation = Literal["nothing", "reset", "restart"]


class Phase(Struct, frozen=True):
    """A part of a preset, and what is done to the workers' caches before it."""

    name: str
    before: Preparation

    def holds(self, session_id: str) -> bool:
        return session_id.startswith(f"{self.name}/")


class Preset(Struct, frozen=True):
    """`label` is what its results must be called. With a cap on requests in flight a load is not an open loop."""

    name: str
    summary: str
    label: str
    trace: Trace
    parameters: dict[str, float]
    max_in_flight: int | None = None
    phases: tuple[Phase, ...] = ()


def preset(name: str) -> Preset:
    """Raises KeyError for a name that is not in `PRESETS`."""
    return PRESETS[name]()


def _prefix_repetition() -> Preset:
    """The smoke that `vllm bench serve` calls by this name: few prefixes, each asked again and again.

    The first request of every prefix fills a cache, the others hit: a mixture, neither a cold nor a warm figure.
    """
    seed, requests, rate, in_flight = 42, 100, 2.0, 4
    prefix_tokens, suffix_tokens, prefixes, output_tokens = 512, 128, 5, 128
    order = Draw(seed, "order").shuffled([number % prefixes for number in range(requests)])
    prompts = _Prompts()
    heads = [prompts.new(prefix_tokens) for _ in range(prefixes)]
    asked = [(*heads[prefix], *prompts.new(suffix_tokens)) for prefix in order]
    return Preset(
        name="prefix_repetition",
        summary="100 requests over 5 prefixes of 512 tokens, 2 a second",
        label="initial_fill_mixed",
        trace=_trace(_arriving(asked, Draw(seed, "arrivals"), rate, output_tokens), "initial_fill_mixed"),
        parameters={
            "requests": requests,
            "seed": seed,
            "rate_per_s": rate,
            "max_in_flight": in_flight,
            "prefix_tokens": prefix_tokens,
            "suffix_tokens": suffix_tokens,
            "prefixes": prefixes,
            "output_tokens": output_tokens,
        },
        max_in_flight=in_flight,
    )


def _cold_warm_restart() -> Preset:
    """The same prompts in three blocks, twice: into emptied caches, again, and again after a restart of the workers.

    No two prompts of a block share anything, so whatever a cold block hits was left over from before it.
    """
    seed, rounds, requests, rate, prompt_tokens, output_tokens = 42, 2, 12, 4.0, 1024, 32
    prompts = _Prompts()
    asked = [prompts.new(prompt_tokens) for _ in range(requests)]
    sessions: list[Session] = []
    phases: list[Phase] = []
    start_ms = 0.0
    blocks: tuple[tuple[str, Preparation], ...] = (("cold", "reset"), ("warm", "nothing"), ("restart", "restart"))
    for round_number in range(1, rounds + 1):
        for block, before in blocks:
            name = f"{block}-{round_number}"
            phases.append(Phase(name, before))
            part = _arriving(asked, Draw(seed, "arrivals"), rate, output_tokens, name=f"{name}/request", at_ms=start_ms)
            sessions += part
            start_ms = part[-1].start_ms + 1000.0
    return Preset(
        name="cold_warm_restart",
        summary="12 prompts in three blocks (cold, warm, restart), two rounds",
        label="cold_warm_restart",
        trace=_trace(sessions, "cold_warm_restart"),
        parameters={
            "requests_per_block": requests,
            "rounds": rounds,
            "seed": seed,
            "rate_per_s": rate,
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
        },
        phases=tuple(phases),
    )


def _hot_prefix() -> Preset:
    """Exactly 80 of 100 requests ask for 2 of 10 prefixes: a cache-aware policy is torn between reuse and balance."""
    seed, requests, rate, prefixes, hot, hot_share = 7, 100, 8.0, 10, 2, 0.8
    prefix_tokens, suffix_tokens, output_tokens = 1024, 64, 32
    hot_requests = round(requests * hot_share)
    chosen = [number % hot for number in range(hot_requests)]
    chosen += [hot + number % (prefixes - hot) for number in range(requests - hot_requests)]
    prompts = _Prompts()
    heads = [prompts.new(prefix_tokens) for _ in range(prefixes)]
    asked = [(*heads[prefix], *prompts.new(suffix_tokens)) for prefix in Draw(seed, "order").shuffled(chosen)]
    return Preset(
        name="hot_prefix",
        summary="80 of 100 requests on 2 of 10 prefixes",
        label="hot_prefix_80_20",
        trace=_trace(_arriving(asked, Draw(seed, "arrivals"), rate, output_tokens), "hot_prefix_80_20"),
        parameters={
            "requests": requests,
            "seed": seed,
            "rate_per_s": rate,
            "prefixes": prefixes,
            "hot_prefixes": hot,
            "hot_requests": hot_requests,
            "prefix_tokens": prefix_tokens,
            "suffix_tokens": suffix_tokens,
            "output_tokens": output_tokens,
        },
    )


def _agents() -> Preset:
    """Agents with one system prompt and tool list, growing contexts, pauses for tools and people, and sub-agents."""
    seed, agents, turns, rate, head_tokens = 11, 12, 6, 1.5, 2048
    draw, prompts = Draw(seed, "sizes"), _Prompts()
    head, sub_head = prompts.new(head_tokens), prompts.new(head_tokens // 2)
    sessions: list[Session] = []
    start_ms = 0.0
    for agent in range(agents):
        own = _growing(head, turns, prompts, draw, stream=agent * 100)
        sessions.append(Session(f"agent-{agent:02}", "", own, round(start_ms, 3)))
        if agent % 3 == 0:
            helper = _growing(sub_head, turns // 2, prompts, draw, stream=agent * 100 + 50)
            begins_ms = round(start_ms + own[1].due_ms, 3)
            sessions.append(Session(f"agent-{agent:02}/helper", "", helper, begins_ms, f"agent-{agent:02}"))
        start_ms += Draw(seed, "arrivals").gap_ms(agent, per_second=rate)
    return Preset(
        name="agents",
        summary="12 agents of 6 turns with one system prompt, 4 of them with a sub-agent",
        label="multi_turn_agents",
        trace=_trace(sessions, "multi_turn_agents"),
        parameters={"agents": agents, "turns": turns, "seed": seed, "rate_per_s": rate, "head_tokens": head_tokens},
    )


def _growing(head: tuple[int, ...], turns: int, prompts: _Prompts, draw: Draw, *, stream: int) -> tuple[Turn, ...]:
    """Every turn brings a task or a tool's result, after the answer before it."""
    ids, due_ms = (*head, *prompts.new(256)), 0.0
    made: list[Turn] = []
    for turn in range(turns):
        number = stream + turn
        output_tokens = 16 * draw.between(number, 2, 8)
        think_ms = 0.0
        if turn:
            person = turn % 3 == 0
            think_ms = float(draw.between(number + 1000, 2000, 4000) if person else draw.between(number, 150, 600))
            due_ms += think_ms
        made.append(Turn(due_ms, think_ms, ids, len(ids) * BLOCK_TOKENS, output_tokens))
        ids = (*ids, *prompts.new(output_tokens), *prompts.new(16 * draw.between(number + 2000, 8, 48)))
    return tuple(made)


def _rag() -> Preset:
    """Questions about few documents: instructions and document come first, so that they can be shared."""
    seed, requests, rate, documents = 23, 80, 6.0, 8
    instruction_tokens, document_tokens, question_tokens, output_tokens = 128, 2048, 48, 48
    draw, prompts = Draw(seed, "documents"), _Prompts()
    instructions = prompts.new(instruction_tokens)
    heads = [(*instructions, *prompts.new(document_tokens)) for _ in range(documents)]
    # The k-th document is asked for in proportion to 1/k, as popularity goes.
    weights = [1 / (rank + 1) for rank in range(documents)]
    asked = [(*heads[_weighted(draw.unit(n), weights)], *prompts.new(question_tokens)) for n in range(requests)]
    return Preset(
        name="rag",
        summary="80 questions about 8 documents of 2048 tokens",
        label="rag_shared_documents",
        trace=_trace(_arriving(asked, Draw(seed, "arrivals"), rate, output_tokens), "rag_shared_documents"),
        parameters={
            "requests": requests,
            "seed": seed,
            "rate_per_s": rate,
            "documents": documents,
            "instruction_tokens": instruction_tokens,
            "document_tokens": document_tokens,
            "question_tokens": question_tokens,
            "output_tokens": output_tokens,
        },
    )


PRESETS: dict[str, Callable[[], Preset]] = {
    "prefix_repetition": _prefix_repetition,
    "cold_warm_restart": _cold_warm_restart,
    "hot_prefix": _hot_prefix,
    "agents": _agents,
    "rag": _rag,
}


class _Prompts:
    """Hands out block ids that nobody had before."""

    def __init__(self) -> None:
        self._next = 0

    def new(self, tokens: int) -> tuple[int, ...]:
        assert tokens % BLOCK_TOKENS == 0, tokens
        first, self._next = self._next, self._next + tokens // BLOCK_TOKENS
        return tuple(range(first, self._next))


def _weighted(unit: float, weights: list[float]) -> int:
    reached, total = 0.0, sum(weights)
    for index, weight in enumerate(weights):
        reached += weight / total
        if unit < reached:
            return index
    return len(weights) - 1


def _arriving(
    asked: list[tuple[int, ...]],
    draw: Draw,
    rate: float,
    output_tokens: int,
    *,
    name: str = "request",
    at_ms: float = 0.0,
) -> list[Session]:
    """One request each; the first at once, the others as a Poisson process."""
    sessions = []
    for number, ids in enumerate(asked):
        at_ms += draw.gap_ms(number, per_second=rate) if number else 0.0
        turn = Turn(0.0, 0.0, ids, len(ids) * BLOCK_TOKENS, output_tokens)
        sessions.append(Session(f"{name}-{number:03}", "", (turn,), round(at_ms, 3)))
    return sessions


def _trace(sessions: list[Session], label: str) -> Trace:
    return Trace(BLOCK_TOKENS, GLOBAL_SCOPE, tuple(sessions), ("Made by a preset, not recorded.",), label)
