"""One event, one line, whatever is in it."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator

import pytest

from kvrelay.edge.observe.logs import log_to


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    logger = logging.getLogger("kvrelay")
    state = logger.handlers[:], logger.propagate, logger.level
    stream = io.StringIO()
    log_to(stream, "INFO")
    yield stream
    logger.handlers[:], logger.propagate = state[:2]
    logger.setLevel(state[2])


def test_time_level_name_and_message(stream: io.StringIO) -> None:
    logging.getLogger("kvrelay.edge.fleet.watch").warning("worker %s is gone", "a")
    logging.getLogger("kvrelay.edge.fleet.watch").debug("not shown")
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z WARNING fleet\.watch worker a is gone\n", stream.getvalue()
    )


def test_nobody_else_writes_our_lines(stream: io.StringIO) -> None:
    logging.getLogger("kvrelay.x").info("the worker said %s", "no\n2026 ERROR forged \x1b[31m")
    assert stream.getvalue().count("\n") == 1
    assert "no\\n2026 ERROR forged \\x1b[31m" in stream.getvalue()


def test_an_exception_fits_on_the_line(stream: io.StringIO) -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("kvrelay.x").exception("failed")
    assert stream.getvalue().count("\n") == 1
    assert re.search(r"ERROR x failed error=ValueError: two\\nlines at .*test_logs\.py:\d+", stream.getvalue())
