"""Runs cases, several at a time, and collects what they found."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable
from typing import Protocol

from msgspec import Struct

from bench.fuzz import admin, answers, requests
from bench.fuzz.finding import BrokenPromise, Finding, chance_of, shortened
from bench.fuzz.rig import Rig, rig

PARTS = {"requests": requests.Case, "answers": answers.Case, "admin": admin.Case}
AT_ONCE = 24
CASES_PER_GATEWAY = 600  # then it must be quiet, and a new one begins


class AnyCase(Protocol):
    @property
    def raw(self) -> bytes: ...
    async def run(self, rig: Rig) -> None: ...


class Outcome(Struct):
    """Of one part."""

    part: str
    cases: int = 0
    seconds: float = 0.0
    findings: list[Finding] = []


async def run_part(part: str, *, seed: int, numbers: Iterable[int], seconds: float, most_findings: int = 20) -> Outcome:
    """Cases `numbers` of a part until they or the seconds are over, or enough is found."""
    outcome = Outcome(part)
    waiting = iter(numbers)
    began_s = time.monotonic()
    over = False
    while not over and len(outcome.findings) < most_findings:
        async with rig() as one:
            for _ in range(CASES_PER_GATEWAY // AT_ONCE):
                batch = list(itertools.islice(waiting, AT_ONCE))
                over = not batch or time.monotonic() - began_s > seconds
                if over or len(outcome.findings) >= most_findings:
                    break
                await _run_batch(part, seed, batch, one, outcome)
            await _check_quiet(part, one, outcome)
    outcome.seconds = time.monotonic() - began_s
    return outcome


async def _run_batch(part: str, seed: int, batch: list[int], one: Rig, outcome: Outcome) -> None:
    found = await asyncio.gather(*(_run_case(part, seed, number, one) for number in batch))
    outcome.cases += len(batch)
    outcome.findings += [each for each in found if each is not None]
    problem = one.problem()
    if problem is not None:
        name = f"{part}:{batch[0]}..{batch[-1]}" if len(batch) > 1 else f"{part}:{batch[0]}"
        outcome.findings.append(Finding(name, *problem, sent=""))


async def _run_case(part: str, seed: int, number: int, one: Rig) -> Finding | None:
    case: AnyCase = PARTS[part](chance_of(seed, part, number), number)
    try:
        await case.run(one)
    except BrokenPromise as broken:
        return Finding(f"{part}:{number}", broken.promise, broken.observed[:4000], shortened(case.raw))
    return None


async def _check_quiet(part: str, one: Rig, outcome: Outcome) -> None:
    left = await one.leftovers()
    if left is not None:
        outcome.findings.append(Finding(f"{part}:?", "nothing stays open", left, sent=""))
    problem = one.problem()
    if problem is not None:
        outcome.findings.append(Finding(f"{part}:?", *problem, sent=""))
