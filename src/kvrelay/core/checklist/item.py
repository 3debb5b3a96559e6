"""An item asks one question of the dossier; its answer is pass, fail or unknown, with a reason and with evidence.

Unknown is never pass: it says that nobody has shown it yet, and what would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from kvrelay.core.checklist.dossier import Dossier
from kvrelay.core.gates.judge import Outcome


class Answer(Struct, frozen=True):
    """`reason` names what was seen, with values. `evidence`: where it lies."""

    verdict: Outcome
    reason: str
    evidence: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()  # where several things have to hold: each with its own verdict


class Item(Struct, frozen=True, kw_only=True):
    """`todo`: what to do as long as the answer is not pass."""

    code: str
    stage: str
    asks: str
    todo: str
    judge: Callable[[Dossier], Answer]


class Checked(Struct, frozen=True, kw_only=True):
    """One line of the list, answered. `todo` is None where nothing is to be done."""

    code: str
    stage: str
    asks: str
    verdict: Outcome
    reason: str
    evidence: tuple[str, ...]
    parts: tuple[str, ...]
    todo: str | None


def check(items: Iterable[Item], dossier: Dossier) -> tuple[Checked, ...]:
    return tuple(_checked(item, item.judge(dossier)) for item in items)


def overall(checked: Sequence[Checked]) -> Outcome:
    """Fail if any fails, unknown if any is unknown or there is none, else pass."""
    return worst([one.verdict for one in checked] or [Outcome.UNKNOWN])


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    found = tuple(outcomes)
    return next((one for one in (Outcome.FAIL, Outcome.UNKNOWN) if one in found), Outcome.PASS)


def all_of(parts: Sequence[Answer]) -> Answer:
    """Every part has to hold; the reason lists all of them, so that nobody sees only the one that is nice."""
    each = [f"{part.verdict.value}: {part.reason}" for part in parts]
    said = "; ".join(part.reason for part in parts)
    evidence = distinct(part.evidence for part in parts)
    return Answer(worst(part.verdict for part in parts), said, evidence, tuple(each) if len(each) > 1 else ())


def passed(reason: str, *evidence: str) -> Answer:
    return Answer(Outcome.PASS, reason, evidence)


def failed(reason: str, *evidence: str) -> Answer:
    return Answer(Outcome.FAIL, reason, evidence)


def unknown(reason: str, *evidence: str) -> Answer:
    return Answer(Outcome.UNKNOWN, reason, evidence)


def distinct(lists: Iterable[Iterable[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one for each in lists for one in each))


def _checked(item: Item, answer: Answer) -> Checked:
    return Checked(
        code=item.code,
        stage=item.stage,
        asks=item.asks,
        verdict=answer.verdict,
        reason=answer.reason,
        evidence=answer.evidence,
        parts=answer.parts,
        todo=None if answer.verdict is Outcome.PASS else item.todo,
    )
