"""AMX: asked for where the kernel uses it, and only there. What it is for is shown on a real engine (tests/real)."""

from __future__ import annotations

import ctypes
import logging
import platform
import sys
from typing import Any

import pytest

from kvrelay.edge.connectors.vllm.kv import tiles


class Library:
    """Stands for libc: notes the calls and answers as Linux does on a processor without tiles."""

    def __init__(self, answer: int) -> None:
        self.calls: list[tuple[int, ...]] = []
        self._answer = answer

    def syscall(self, *numbers: int) -> int:
        self.calls.append(numbers)
        return self._answer


@pytest.mark.parametrize(
    ("kernel", "answer", "asked", "warned"), [("amx", 0, 1, 0), ("amx", -1, 1, 1), ("vec", 0, 0, 0)]
)
def test_it_is_asked_for_where_the_kernel_uses_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kernel: str, answer: int, asked: int, warned: int
) -> None:
    library = Library(answer)

    def found(name: Any, *, use_errno: bool) -> Library:
        assert name is None and use_errno
        return library

    monkeypatch.setattr(ctypes, "CDLL", found)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(sys, "platform", "linux")
    with caplog.at_level(logging.WARNING):
        tiles.permit_tiles(kernel)
    assert len(library.calls) == asked and len(caplog.records) == warned
    assert all(numbers == (158, 0x1023, 18) for numbers in library.calls)
    tiles.permit_tiles(None)
    assert len(library.calls) == asked
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    tiles.permit_tiles("amx")
    assert len(library.calls) == asked, "no such call there"
