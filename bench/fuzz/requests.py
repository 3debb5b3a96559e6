"""Cases for the data port: what arrives there from clients, and from who is none."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

from bench.fuzz.connection import HANG_S, Connection, in_pieces
from bench.fuzz.finding import BrokenPromise
from bench.fuzz.mutate import mutated, smuggling
from bench.fuzz.strict import Message
from bench.fuzz.valid_request import HIDDEN, OPEN, ValidRequest, valid_request

if TYPE_CHECKING:
    from bench.fuzz.rig import Rig

SILENCE_S = 0.3  # after wrong bytes there may be nothing to wait for


class Case:
    """One connection: requests before, bytes in the middle (wrong, or none), requests after."""

    def __init__(self, chance: random.Random, number: int) -> None:
        well_formed = chance.random() < 0.3
        make = partial(valid_request, chance, embedded=HIDDEN if well_formed else OPEN)
        self.before = [make(f"{number}-b{i}") for i in range(chance.randrange(0, 4))]
        self.after = [make(f"{number}-a{i}") for i in range(chance.randrange(2, 4))]
        self.middle = b"" if well_formed else self._wrong_bytes(chance, number)
        whole = b"".join([*(each.raw for each in self.before), self.middle, *(each.raw for each in self.after)])
        self.sent = in_pieces(chance, whole)
        self.leaves = chance.random() < 0.1
        if self.leaves:
            self.sent = self.sent[: chance.randrange(len(self.sent) + 1)]

    def _wrong_bytes(self, chance: random.Random, number: int) -> bytes:
        match chance.randrange(7):
            case 0 | 1:
                return smuggling(chance, HIDDEN, OPEN)
            case 2:
                return chance.randbytes(chance.randrange(1, 400))
            case _:
                victim = valid_request(chance, f"{number}-m", method="POST")
                return mutated(chance, victim.raw, within=victim.head_bytes)

    @property
    def raw(self) -> bytes:
        return b"".join(self.sent)

    async def run(self, rig: Rig) -> None:
        """Raises BrokenPromise."""
        async with Connection(rig.port) as connection:
            await connection.write(self.sent)
            if self.leaves:
                return
            sure = self.before if self.middle else [*self.before, *self.after]
            last = self.after[-1].name
            await connection.read_until(lambda each: not sure or _named(each, sure[-1].name), patience_s=HANG_S)
            await connection.read_until(lambda each: _named(each, last), patience_s=SILENCE_S)
            self.judge(await connection.end(), len(sure))

    def judge(self, answers: list[Message], sure: int) -> None:
        """Answers of well-formed requests are right and in order; the first `sure` requests must have one."""
        order = [*self.before, *self.after]
        place = 0
        wrong_at = len(self.before)  # where the wrong bytes are, or what they have been joined with ends
        for number, answer in enumerate(answers):
            name = (answer.value(b"x-id") or b"").decode("latin-1")
            found = next((i for i in range(place, len(order)) if order[i].name == name), None)
            if found is not None:
                self._check_skipped(order, place, found, answer)
                if _is_answer(order[found], answer):
                    place = found + 1
                elif self.middle and found == place == len(self.before):
                    # wrong bytes without an end made one request with what follows them, which names it
                    wrong_at = place = found + 1
                else:
                    expected = order[found].answer
                    raise BrokenPromise("every answer is the one of its request", f"{answer}, expected {expected!r}")
            elif any(each.name == name for each in order):
                raise BrokenPromise("every request is answered once and in order", f"{name} again, in {answers}")
            elif not self.middle or place != wrong_at:
                raise BrokenPromise("only what was asked is answered", repr(answer))
            elif answer.value(b"connection") == b"close" and number + 1 < len(answers):
                raise BrokenPromise("nothing follows the last answer of a connection", repr(answers[number + 1]))
        if place < sure:
            raise BrokenPromise("well-formed requests are answered", f"{place} of {sure}; received {answers}")

    def _check_skipped(self, order: list[ValidRequest], place: int, found: int, answer: Message) -> None:
        """Only wrong bytes may swallow what follows them."""
        if found > place and (place < len(self.before) or not self.middle):
            raise BrokenPromise("no well-formed request is left out", f"{order[place].name} before {answer}")


def _named(answers: list[Message], name: str) -> bool:
    return any(answer.value(b"x-id") == name.encode() for answer in answers)


def _is_answer(request: ValidRequest, answer: Message) -> bool:
    return answer.status == 200 and answer.body == request.answer
