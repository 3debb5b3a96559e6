"""More than the fleet can take, less memory than it wants, and workers that come while it works."""

from __future__ import annotations

from kvrelay.lab.drills import promises as hold
from kvrelay.lab.drills.actions import AddWorker
from kvrelay.lab.drills.catalog.traffic import conversation, crowd, history
from kvrelay.lab.drills.drill import Drill, Look, Promise, Send, Settle, Setup, Turn, Wait, workers
from kvrelay.lab.drills.history import Finding, History, found

_PATIENCE_S = 2.0
_PREFILL_TOKENS_PER_S, _PROMPT_TOKENS, _WORKERS = 4_000.0, 400, 3
_CAPACITY_PER_S = _WORKERS * _PREFILL_TOKENS_PER_S / _PROMPT_TOKENS  # prefill alone: an upper bound
_SECONDS = 3.0
_CALM_SHARE, _OVER_SHARE = 0.5, 4.0
_LEAST_SHARE = 0.7


def _rush(name: str, share: float, seed: int) -> tuple[Turn, ...]:
    """Clients that give up after `_PATIENCE_S`."""
    count = round(_CAPACITY_PER_S * share * _SECONDS)
    turns = crowd(name, count, seed=seed, over_s=_SECONDS, tokens=_PROMPT_TOKENS, max_tokens=2)
    return tuple(
        Turn(id=turn.id, text=turn.text, at_s=turn.at_s, max_tokens=2, leaves_after_s=_PATIENCE_S) for turn in turns
    )


def _goodput(seen: History) -> Finding:
    """Answers in time per second of arrivals; under overload it must not fall below that of the calm part's rate."""
    rates = []
    for step in (0, 1):
        good = [outcome for outcome in seen.of_step(step) if outcome.ending == "ok"]
        rates.append(len(good) / _SECONDS)
    offered = [len(seen.of_step(step)) / _SECONDS for step in (0, 1)]
    observed = (
        f"{offered[0]:.0f}/s offered: {rates[0]:.1f}/s good; {offered[1]:.0f}/s offered: {rates[1]:.1f}/s good"
        f" (ideal capacity {_CAPACITY_PER_S:.0f}/s)"
    )
    return found(rates[1] >= _LEAST_SHARE * min(_CAPACITY_PER_S, rates[0] / _CALM_SHARE), observed)


def _refused_early(seen: History) -> Finding:
    """Who cannot be served hears so instead of waiting in vain."""
    turns = seen.of_step(1)
    refused = sum(outcome.ending == "refused" for outcome in turns)
    left = sum(outcome.ending == "left" for outcome in turns)
    return found(refused >= left, f"of {len(turns)}: {refused} were refused, {left} waited in vain")


OVERLOAD = Drill(
    name="overload",
    title="Four times as many requests as the fleet can serve",
    why="A fleet that works on answers which nobody waits for any more serves nobody. Goodput must not collapse.",
    breaks="Nothing: the traffic is the blow.",
    setup=Setup(
        workers=workers(_WORKERS, max_active_requests=4),
        prefill_tokens_per_s=_PREFILL_TOKENS_PER_S,
        queue_depth=24,
        queue_wait_s=1.0,
    ),
    steps=(
        Send(_rush("calm", _CALM_SHARE, 141)),
        Wait(0.5),
        Send(_rush("over", _OVER_SHARE, 142)),
        Wait(0.5),
        Send(crowd("after", 20, seed=143, over_s=1.0)),
        Wait(0.3),
        Look("end"),
    ),
    promises=(
        hold.all_ok(0),
        Promise(f"goodput under overload is at least {_LEAST_SHARE:.0%} of what can be served", _goodput),
        Promise("more are refused at once than wait in vain", _refused_early),
        hold.all_ok(2),
    ),
)

_TALKS = tuple(conversation(f"talk{number}", 150 + number, 4, every_s=0.3) for number in range(8))


def _nobody_ended(seen: History) -> Finding:
    before = {worker.name: worker.life for worker in seen.view("begin").workers}
    after = {worker.name: worker.life for worker in seen.view("end").workers if worker.routable}
    if not before or None in before.values():
        return found(None, f"lives of workers are {hold.NOT_OBSERVED}")
    ended = [name for name, life in before.items() if after.get(name) != life]
    return found(not ended, f"{len(before)} workers; ended, begun anew, or no longer used: {ended or 'none'}")


MEMORY_PRESSURE = Drill(
    name="memory-pressure",
    title="The caches are far too small",
    why="Everything is evicted all the time, running requests are put back. All stays right, and claims follow.",
    breaks="Workers have room for three prompts each, and get many at once.",
    covers=("DR-16",),
    setup=Setup(workers=workers(2, blocks=96, max_num_seqs=8)),
    steps=(
        Look("begin"),
        Send(tuple(turn for talk in _TALKS for turn in talk)),
        Send(crowd("many", 40, seed=159, over_s=0.1, tokens=320, max_tokens=32)),
        Wait(1.0),
        Look("end", texts=tuple(history(150 + number, 4) for number in range(8))),
    ),
    promises=(
        hold.all_ok(0),
        hold.all_ok(1),
        Promise("no worker ended", _nobody_ended),
        hold.claims_are_true("end"),
    ),
)

COLD_START = Drill(
    name="cold-start",
    title="A worker joins a fleet that is warm",
    why="A new worker has an empty cache, so a policy that goes by the cache alone would never use it.",
    breaks="Nothing: a third worker joins under load, with nothing cached.",
    setup=Setup(workers=workers(2)),
    steps=(
        Send(tuple(turn for talk in _TALKS[:4] for turn in talk)),
        Send(crowd("while", 60, seed=161, over_s=0.6), blows=((0.2, AddWorker("w2")),)),
        Settle(),
        Send(crowd("after", 60, seed=162, over_s=0.6)),
        Wait(0.5),
        Look("end", texts=(history(150, 4),)),
    ),
    promises=(
        hold.all_ok(0),
        hold.all_ok(1),
        hold.recovered(),
        hold.all_ok(2),
        hold.everybody_serves(2),
        hold.claims_are_true("end"),
    ),
)

DRILLS = (OVERLOAD, MEMORY_PRESSURE, COLD_START)
