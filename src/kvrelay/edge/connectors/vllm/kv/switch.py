"""Whether this worker shares KV now: an operator's switch. The report port throws it, the scheduler's half obeys."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


class Switch:
    """On from the start of every process. Written by the report port's threads, read by the scheduler: one flag, so
    neither needs a lock."""

    def __init__(self) -> None:
        self.on = True

    def throw(self, on: bool) -> None:
        if on != self.on:
            what = "shared again" if on else "neither loaded nor saved"
            log.warning("KV is %s from now on, by order of an operator", what)
        self.on = on
