"""The language of TCP faults: what each instruction means, and what is said about a wrong one."""

from __future__ import annotations

import pytest

from kvrelay.edge.chaos.tcp_script import (
    Bandwidth,
    Blackhole,
    ClearAll,
    Direction,
    End,
    Ending,
    Latency,
    Refuse,
    Stall,
    TcpInstruction,
    parse_tcp_script,
)
from kvrelay.edge.chaos.words import ScriptError

BOTH = (Direction.UP, Direction.DOWN)


@pytest.mark.parametrize(
    ("text", "instruction"),
    [
        ("latency 50ms", TcpInstruction(Latency(0.05))),
        ("latency 1s jitter 20ms", TcpInstruction(Latency(1.0, 0.02))),
        ("bandwidth 64kB/s", TcpInstruction(Bandwidth(64_000))),
        ("bandwidth 1.5MB/s", TcpInstruction(Bandwidth(1_500_000))),
        ("down stall", TcpInstruction(Stall(), (Direction.DOWN,))),
        ("at 2s blackhole for 3s", TcpInstruction(Blackhole(), at_s=2.0, for_s=3.0)),
        ("refuse for 1m", TcpInstruction(Refuse(), for_s=60.0)),
        ("reset", TcpInstruction(End(Ending.RESET))),
        ("at 500ms up half-close", TcpInstruction(End(Ending.HALF_CLOSE), (Direction.UP,), at_s=0.5)),
        ("down half-close after 7", TcpInstruction(End(Ending.HALF_CLOSE, 7), (Direction.DOWN,))),
        ("truncate 4096", TcpInstruction(End(Ending.TRUNCATE, 4096))),
        ("clear  # all of it", TcpInstruction(ClearAll())),
    ],
)
def test_every_form_is_understood(text: str, instruction: TcpInstruction) -> None:
    (parsed,) = parse_tcp_script(text)
    assert (parsed.what, parsed.directions, parsed.at_s, parsed.for_s) == (
        instruction.what,
        instruction.directions,
        instruction.at_s,
        instruction.for_s,
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("latncy 5ms", "line 1, `latncy 5ms`: unknown instruction `latncy`; known: latency, bandwidth, stall,"),
        ("stall\nlatency fast", "line 2, `latency fast`: `fast` is no duration; legal: 500ms, 2s, 1.5s, 1m"),
        ("bandwidth 0B/s", "`0B/s` is no rate; legal: 500B/s, 64kB/s, 1.5MB/s"),
        ("reset for 2s", "it happens at one moment, so it has no `for`"),
        ("up refuse", "`refuse` is for both directions at once"),
        ("truncate", "legal: truncate BYTES"),
        ("at 2s", "legal: at DURATION INSTRUCTION"),
    ],
)
def test_a_mistake_is_named_with_what_would_be_legal(text: str, message: str) -> None:
    with pytest.raises(ScriptError) as raised:
        parse_tcp_script(text)
    assert message in str(raised.value)
