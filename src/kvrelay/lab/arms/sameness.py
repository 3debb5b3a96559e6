"""Were the arms the same but for what they were to differ in? Asked of what they were really started with."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from kvrelay.lab.arms.contender import Difference, differences, read_flat
from kvrelay.lab.arms.manifest import ArmFacts, Manifest

CONFIG = "gateway.toml"


class Sameness(Struct, frozen=True):
    """`differences` is by arm, against the first arm. `problems`: what makes arms incomparable."""

    differences: Mapping[str, tuple[Difference, ...]]
    problems: tuple[str, ...]


def compare_configs(left: Path, right: Path) -> tuple[Difference, ...]:
    """Of two gateway configurations. Raises OSError or tomllib.TOMLDecodeError."""
    return differences(read_flat(left), read_flat(right))


def sameness_of(folder: Path, manifest: Manifest) -> Sameness:
    """Of the arms of a run whose files are in `folder`."""
    arms = manifest.observed
    if not arms:
        return Sameness({}, ())
    found: dict[str, tuple[Difference, ...]] = {}
    problems = [*_same_schedule(arms), *_same_engines(arms)]
    first = arms[0]
    for facts in arms[1:]:
        try:
            found[facts.arm] = compare_configs(_config(folder, first.arm), _config(folder, facts.arm))
        except (OSError, tomllib.TOMLDecodeError) as problem:
            problems.append(f"the configuration of {facts.arm} cannot be compared: {problem}")
    for arm, all_of_it in found.items():
        factors = sorted({difference.factor for difference in all_of_it})
        if len(factors) > 1:
            problems.append(f"{arm} differs from {first.arm} in {len(factors)} factors: {', '.join(factors)}")
    return Sameness(found, tuple(problems))


def _config(folder: Path, arm: str) -> Path:
    return folder / "arms" / arm / CONFIG


def _same_schedule(arms: Sequence[ArmFacts]) -> list[str]:
    first = arms[0]
    return [
        f"{facts.arm} sent another {what} than {first.arm}"
        for facts in arms[1:]
        for what, one, other in (
            ("schedule", facts.schedule_sha256, first.schedule_sha256),
            ("primer", facts.primer_sha256, first.primer_sha256),
        )
        if one != other
    ]


def _same_engines(arms: Sequence[ArmFacts]) -> list[str]:
    """Name, version, block size and hardware of every worker stay what they were in the first arm."""
    first = _engines(arms[0])
    return [f"{facts.arm} had other engines than {arms[0].arm}" for facts in arms[1:] if _engines(facts) != first]


def _engines(facts: ArmFacts) -> list[tuple[str, str | None, int | None, str | None]]:
    return [
        (process.name, process.version, process.block_size_tokens, process.hardware)
        for process in facts.processes
        if process.role == "worker"
    ]
