"""The language in which faults of a TCP path are written, one instruction a line (or between `;`).

    latency 50ms                latency 50ms jitter 20ms        bandwidth 64kB/s
    stall                       blackhole                       refuse
    reset                       reset after 4096                half-close
    truncate 4096               half-close after 4096           clear

    down latency 80ms           only from the server to the client (`up`: only the other way)
    at 2s reset                 two seconds after the script was given
    at 2s blackhole for 3s      and passing again three seconds later

`stall` keeps the bytes until it ends, `blackhole` loses them, `refuse` listens no more. `reset` and `half-close` strike
the connections that are open, with `after N` (and `truncate N`) each connection once N bytes have passed that way. A
truncated connection ends in good order, just too early. `clear` ends everything. `#` begins a comment.
"""

from __future__ import annotations

import re
from enum import Enum

from msgspec import Struct

from kvrelay.edge.chaos.words import ScriptError, duration_s, not_legal, number, parts

MAX_BYTES = 2**50
_RATES = {"B/s": 1, "kB/s": 1_000, "MB/s": 1_000_000}


class Direction(Enum):
    """Up is from whoever connected to the server behind the proxy."""

    UP = "up"
    DOWN = "down"


class Latency(Struct, frozen=True):
    """Each byte arrives this much later, the order kept; jitter is drawn evenly from 0 to `jitter_s` on top."""

    by_s: float
    jitter_s: float = 0.0


class Bandwidth(Struct, frozen=True):
    """All connections together."""

    bytes_per_s: float


class Stall(Struct, frozen=True):
    pass


class Blackhole(Struct, frozen=True):
    pass


class Refuse(Struct, frozen=True):
    pass


class Ending(Enum):
    RESET = "reset"
    TRUNCATE = "truncate"
    HALF_CLOSE = "half-close"


class End(Struct, frozen=True):
    """`after_bytes=None`: the open connections, now."""

    how: Ending
    after_bytes: int | None = None


class ClearAll(Struct, frozen=True):
    pass


What = Latency | Bandwidth | Stall | Blackhole | Refuse | End | ClearAll


class TcpInstruction(Struct, frozen=True):
    """What, which way, and when: `at_s` after it was given, for `for_s` (None: until `clear`)."""

    what: What
    directions: tuple[Direction, ...] = (Direction.UP, Direction.DOWN)
    at_s: float = 0.0
    for_s: float | None = None
    text: str = ""

    @property
    def lasts(self) -> bool:
        """Is it a state of the path, and not one blow?"""
        return not isinstance(self.what, ClearAll) and not (
            isinstance(self.what, End) and self.what.after_bytes is None
        )


_FORMS = {
    "latency": "latency DURATION [jitter DURATION]",
    "bandwidth": "bandwidth RATE, such as 64kB/s",
    "stall": "stall",
    "blackhole": "blackhole",
    "refuse": "refuse",
    "reset": "reset | reset after BYTES",
    "truncate": "truncate BYTES",
    "half-close": "half-close | half-close after BYTES",
    "clear": "clear",
    "at": "at DURATION INSTRUCTION",
    "up": "up INSTRUCTION",
    "down": "down INSTRUCTION",
}


def parse_tcp_script(text: str) -> tuple[TcpInstruction, ...]:
    """Raises ScriptError, which names the line."""
    instructions = []
    for line, part, words in parts(text):
        try:
            instructions.append(_instruction(words, part))
        except ScriptError as error:
            raise ScriptError(f"line {line}, `{part}`: {error}") from None
    return tuple(instructions)


def _instruction(words: list[str], text: str) -> TcpInstruction:
    at_s, for_s = 0.0, None
    directions = tuple(Direction)
    if words[0] == "at" and len(words) > 2:
        at_s, words = duration_s(words[1]), words[2:]
    if len(words) > 2 and words[-2] == "for":
        for_s, words = duration_s(words[-1]), words[:-2]
    if words[0] in ("up", "down") and len(words) > 1:
        directions, words = (Direction(words[0]),), words[1:]
    instruction = TcpInstruction(_what(words), directions, at_s, for_s, text)
    if for_s is not None and not instruction.lasts:
        raise ScriptError("it happens at one moment, so it has no `for`")
    if len(directions) == 1 and isinstance(instruction.what, Refuse | ClearAll):
        raise ScriptError(f"`{words[0]}` is for both directions at once")
    return instruction


def _what(words: list[str]) -> What:
    match words:
        case ["latency", by]:
            return Latency(duration_s(by))
        case ["latency", by, "jitter", jitter]:
            return Latency(duration_s(by), duration_s(jitter))
        case ["bandwidth", rate]:
            return Bandwidth(_rate(rate))
        case ["stall"]:
            return Stall()
        case ["blackhole"]:
            return Blackhole()
        case ["refuse"]:
            return Refuse()
        case ["reset" | "half-close" as how]:
            return End(Ending(how))
        case ["reset" | "half-close" as how, "after", count]:
            return End(Ending(how), number(count, 0, MAX_BYTES))
        case ["truncate", count]:
            return End(Ending.TRUNCATE, number(count, 0, MAX_BYTES))
        case ["clear"]:
            return ClearAll()
    raise ScriptError(not_legal(words[0], _FORMS))


def _rate(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kM]?B/s)", text)
    if found is None or not float(found[1]):
        raise ScriptError(f"`{text}` is no rate; legal: 500B/s, 64kB/s, 1.5MB/s")
    return float(found[1]) * _RATES[found[2]]
