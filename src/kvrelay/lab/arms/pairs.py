"""Puts two policies' requests side by side: the same turn of the same session in the same repeat, by bucket.

Buckets are by how much of a prompt could have been reused (from the plan: the same for every policy) and by how many
requests were in flight when it was due (the mean of both arms: taking one arm's alone would put its own bad moments
into one bucket, and make the other look better there).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from msgspec import Struct

from kvrelay.core.gates.gate_file import Edges
from kvrelay.core.gates.judge import Compared
from kvrelay.core.stats.paired import Pair, compare
from kvrelay.lab.arms.planned import PlannedRow
from kvrelay.lab.arms.results import ArmData
from kvrelay.lab.replay.sample import Sample
from kvrelay.lab.replay.sending import session_walls

Key = tuple[int, str, int]
"""Repeat, session, turn."""


class Buckets(Struct, frozen=True):
    """Upper bounds, each the first value of the next bucket."""

    prefix_tokens: tuple[int, ...]
    in_flight: tuple[float, ...]

    def number(self, prefix_tokens: int, in_flight: float) -> int:
        prefix, load = bisect_right(self.prefix_tokens, prefix_tokens), bisect_right(self.in_flight, in_flight)
        return prefix * (len(self.in_flight) + 1) + load

    def name(self, number: int) -> str:
        prefix, load = divmod(number, len(self.in_flight) + 1)
        return f"prefix {_range(self.prefix_tokens, prefix)} tokens, {_range(self.in_flight, load)} in flight"


class Comparisons(Struct, frozen=True, eq=False):
    """One contender against the baseline, with what could not be paired."""

    compared: Compared
    buckets: Buckets
    unpaired: int  # requests that one of the two did not answer; they are in `compared.failures`


def compare_policies(
    baseline: Sequence[ArmData], candidate: Sequence[ArmData], rows: Sequence[PlannedRow], edges: Edges, *, seed: int
) -> Comparisons:
    """Both with the same repeats. The seed is of the resampling."""
    rng = np.random.default_rng(seed)
    prefix = {(row.session_id, row.turn): row.prefix_tokens for row in rows}
    left, right = _by_key(baseline), _by_key(candidate)
    keys = sorted(
        {(data.arm.repeat, row.session_id, row.turn) for data in (*baseline, *candidate) for row in rows},
    )
    load = _load_of(keys, _loads(baseline), _loads(candidate))
    buckets = _buckets(edges, [prefix[key[1:]] for key in keys], [load[key] for key in keys if key in load])
    bucket_of = {key: buckets.number(prefix[key[1:]], load.get(key, 0.0)) for key in keys}
    pairs = [pair for key in keys if (pair := _pair(key, bucket_of[key], buckets, left, right)) is not None]
    pairs.sort(key=lambda pair: (pair[0], pair[1].repeat, pair[1].session_id))
    metrics = {
        "ttft_ms": compare([pair for _, pair in pairs], rng),
        "session_wall_ms": compare(_wall_pairs(baseline, candidate), rng),
    }
    return Comparisons(Compared(metrics, _failures(bucket_of, buckets, left, right)), buckets, len(keys) - len(pairs))


def _pair(
    key: Key, bucket: int, buckets: Buckets, left: Mapping[Key, Sample], right: Mapping[Key, Sample]
) -> tuple[int, Pair] | None:
    one, other = left.get(key), right.get(key)
    if one is None or other is None or not (one.ok and other.ok):
        return None
    if not one.ttft_ms or not other.ttft_ms:  # an answer without content, or one that took no time
        return None
    return bucket, Pair(key[0], key[1], buckets.name(bucket), one.ttft_ms, other.ttft_ms)


def _wall_pairs(baseline: Sequence[ArmData], candidate: Sequence[ArmData]) -> list[Pair]:
    """Sessions that succeeded under both: a session that gave up early took less time, and is no better for it."""
    left, right = _walls(baseline), _walls(candidate)
    return [
        Pair(repeat, session_id, "all sessions", left[(repeat, session_id)], right[(repeat, session_id)])
        for repeat, session_id in sorted(left.keys() & right.keys())
    ]


def _walls(arms: Sequence[ArmData]) -> dict[tuple[int, str], float]:
    return {
        (data.arm.repeat, wall.session_id): wall.from_due_ms
        for data in arms
        for wall in session_walls(data.samples)
        if not wall.failures and wall.from_due_ms > 0
    }


def _failures(
    bucket_of: Mapping[Key, int], buckets: Buckets, left: Mapping[Key, Sample], right: Mapping[Key, Sample]
) -> dict[str, tuple[int, int]]:
    counts = {number: [0, 0] for number in sorted(set(bucket_of.values()))}
    for key, number in bucket_of.items():
        for side, samples in enumerate((left, right)):
            sample = samples.get(key)
            counts[number][side] += sample is None or not sample.ok
    return {buckets.name(number): (one, other) for number, (one, other) in counts.items()}


def _by_key(arms: Sequence[ArmData]) -> dict[Key, Sample]:
    return {(data.arm.repeat, sample.session_id, sample.turn): sample for data in arms for sample in data.samples}


def _loads(arms: Sequence[ArmData]) -> dict[Key, int]:
    """How many other requests of the arm were in flight when each was due."""
    found: dict[Key, int] = {}
    for data in arms:
        sent = np.sort([sample.sent_ms for sample in data.samples])
        ended = np.sort([sample.ended_ms for sample in data.samples])
        for sample in data.samples:
            begun, over = (int(np.searchsorted(times, sample.due_ms, side="right")) for times in (sent, ended))
            found[(data.arm.repeat, sample.session_id, sample.turn)] = begun - over
    return found


def _load_of(keys: Iterable[Key], left: Mapping[Key, int], right: Mapping[Key, int]) -> dict[Key, float]:
    found = {}
    for key in keys:
        known = [side[key] for side in (left, right) if key in side]
        if known:
            found[key] = sum(known) / len(known)
    return found


def _buckets(edges: Edges, prefixes: Sequence[int], loads: Sequence[float]) -> Buckets:
    """Thirds of the prefixes and halves of the loads, unless the gates state edges. Equal edges fall together."""
    prefix = edges.prefix_tokens or _cuts(prefixes, (1 / 3, 2 / 3))
    load = edges.in_flight or _cuts(loads, (0.5,))
    return Buckets(tuple(int(edge) for edge in prefix), tuple(load))


def _cuts(values: Sequence[float], shares: Sequence[float]) -> tuple[float, ...]:
    if not values:
        return ()
    ordered = sorted(values)
    cuts = {ordered[int(share * (len(ordered) - 1))] for share in shares}
    return tuple(sorted(cut for cut in cuts if cut > ordered[0]))


def _range(edges: Sequence[float], number: int) -> str:
    if not edges:
        return "any"
    if number == 0:
        return f"below {edges[0]:g}"
    if number == len(edges):
        return f"from {edges[-1]:g}"
    return f"{edges[number - 1]:g} to {edges[number]:g}"
