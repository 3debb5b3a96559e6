"""The language in which faults of an event stream are written, one instruction a line (or between `;`).

    drop 17                 drop 20-25              drop 40-            drop tail
    delay 30 2s             duplicate 7             duplicate 7 3       reorder 10 12
    hold 40 until release   hold 40- until 45       release             clear
    replay off              replay on               replay drop 17      replay last 5
    replay delay 2s         replay cut 3

Numbers are the batches' own sequence numbers; `40-` means from 40 on, `all` means every batch. The first instruction
that names a batch decides what happens to it. `drop tail` loses whatever turns out to be the newest batch: each is held
back until the next one comes. `reorder 10 12` sends 10 right after 12. `#` begins a comment.
"""

from __future__ import annotations

import re

from msgspec import Struct

from kvrelay.edge.chaos.words import ScriptError, duration_s, not_legal, number, parts

MAX_SEQ = 2**64 - 2
MAX_COPIES = 100


class Seqs(Struct, frozen=True):
    """Sequence numbers from `first` to `last`, both included."""

    first: int = 0
    last: int = MAX_SEQ

    def __contains__(self, seq: int) -> bool:
        return self.first <= seq <= self.last

    def __str__(self) -> str:
        if self.first == self.last:
            return str(self.first)
        return f"{self.first}-{self.last if self.last < MAX_SEQ else ''}"


class Drop(Struct, frozen=True):
    seqs: Seqs


class DropTail(Struct, frozen=True):
    pass


class Delay(Struct, frozen=True):
    seqs: Seqs
    by_s: float


class Duplicate(Struct, frozen=True):
    seqs: Seqs
    copies: int  # sent in all


class Reorder(Struct, frozen=True):
    seq: int
    after: int


class Hold(Struct, frozen=True):
    seqs: Seqs
    until: int | None  # None: until `release`


class Release(Struct, frozen=True):
    """Lets go what is held or delayed, in order."""


class Clear(Struct, frozen=True):
    """Forgets all instructions; what is held comes out."""


class ReplayOff(Struct, frozen=True):
    """Requests get no answer."""


class ReplayOn(Struct, frozen=True):
    """Answers pass as they are."""


class ReplayDrop(Struct, frozen=True):
    seqs: Seqs


class ReplayLast(Struct, frozen=True):
    """As if the worker's buffer were this small."""

    batches: int


class ReplayDelay(Struct, frozen=True):
    by_s: float


class ReplayCut(Struct, frozen=True):
    """The answer stops after so many batches and never ends."""

    batches: int


EventFault = Drop | DropTail | Delay | Duplicate | Reorder | Hold
ReplayFault = ReplayOff | ReplayOn | ReplayDrop | ReplayLast | ReplayDelay | ReplayCut
Instruction = EventFault | ReplayFault | Release | Clear

_FORMS = {
    "drop": "drop SEQS | drop tail",
    "delay": "delay SEQS DURATION",
    "duplicate": "duplicate SEQS [COPIES]",
    "reorder": "reorder SEQ LATER_SEQ",
    "hold": "hold SEQS until release | hold SEQS until SEQ",
    "release": "release",
    "clear": "clear",
    "replay": "replay on | off | drop SEQS | last N | delay DURATION | cut N",
}


def parse_script(text: str) -> tuple[Instruction, ...]:
    """Raises ScriptError, which names the line."""
    instructions: list[Instruction] = []
    for line, part, words in parts(text):
        try:
            instructions.append(_instruction(words))
        except ScriptError as error:
            raise ScriptError(f"line {line}, `{part}`: {error}") from None
    return tuple(instructions)


def _instruction(words: list[str]) -> Instruction:
    match words:
        case ["drop", "tail"]:
            return DropTail()
        case ["drop", seqs]:
            return Drop(_seqs(seqs))
        case ["delay", seqs, duration]:
            return Delay(_seqs(seqs), duration_s(duration))
        case ["duplicate", seqs]:
            return Duplicate(_seqs(seqs), 2)
        case ["duplicate", seqs, copies]:
            return Duplicate(_seqs(seqs), number(copies, 2, MAX_COPIES))
        case ["reorder", seq, later]:
            return _reorder(number(seq, 0, MAX_SEQ), number(later, 0, MAX_SEQ))
        case ["hold", seqs, "until", "release"]:
            return Hold(_seqs(seqs), None)
        case ["hold", seqs, "until", seq]:
            return _hold_until(_seqs(seqs), number(seq, 0, MAX_SEQ))
        case ["release"]:
            return Release()
        case ["clear"]:
            return Clear()
        case ["replay", *rest]:
            return _replay(rest)
    raise ScriptError(not_legal(words[0], _FORMS))


def _replay(words: list[str]) -> ReplayFault:
    match words:
        case ["off"]:
            return ReplayOff()
        case ["on"]:
            return ReplayOn()
        case ["drop", seqs]:
            return ReplayDrop(_seqs(seqs))
        case ["last", batches]:
            return ReplayLast(number(batches, 0, MAX_SEQ))
        case ["delay", duration]:
            return ReplayDelay(duration_s(duration))
        case ["cut", batches]:
            return ReplayCut(number(batches, 0, MAX_SEQ))
    raise ScriptError(f"legal: {_FORMS['replay']}")


def _reorder(seq: int, later: int) -> Reorder:
    if later <= seq:
        raise ScriptError(f"{later} does not come after {seq}; legal: {_FORMS['reorder']}")
    return Reorder(seq, later)


def _hold_until(seqs: Seqs, until: int) -> Hold:
    if until < seqs.first:
        raise ScriptError(f"{until} comes before {seqs.first}; legal: {_FORMS['hold']}")
    return Hold(seqs, until)


def _seqs(text: str) -> Seqs:
    if text == "all":
        return Seqs()
    found = re.fullmatch(r"(\d+)(-(\d*))?", text)
    if found is None:
        raise ScriptError(f"`{text}` names no batches; legal: 17, 20-25, 40-, all")
    first = int(found[1])
    last = first if found[2] is None else int(found[3]) if found[3] else MAX_SEQ
    if not first <= last <= MAX_SEQ:
        raise ScriptError(f"`{text}` names no batches: {last} is smaller than {first}, or too large")
    return Seqs(first, last)
