"""What the agent beside a worker says, held against what the router believes of that worker.

A heartbeat may overtake the event that it names, and an index that differs after a snapshot will differ after the next
one too. So a lost tail is one that stayed away for a while, and the pause between two comparisons doubles as long as
they find a difference.
"""

from __future__ import annotations

from kvrelay.core.index.sequence import Sequence
from kvrelay.core.model.census import Census
from kvrelay.core.model.events import AgentHeartbeat
from kvrelay.core.model.units import IndexState

SECONDS_PER_BLOCK = 1e-4  # counting a million blocks takes a tenth of a second: at most 0.1 % of the time goes into it
LONGEST_PAUSE_S = 300.0


class AgentWord:
    """Of one worker rank."""

    def __init__(self, *, grace_s: float, interval_s: float) -> None:
        self._grace_s = grace_s
        self._interval_s = self._pause_s = interval_s
        self._behind: tuple[float, int] | None = None  # since when we lack which number
        self._compare_at = float("-inf")
        self.heard_at: float | None = None
        self.last_seq: int | None = None
        self.census: Census | None = None

    def names_lost_tail(self, now: float, heartbeat: AgentHeartbeat, sequence: Sequence) -> bool:
        """True when an event that the agent has did not come here within the grace."""
        self.heard_at, self.last_seq, self.census = now, heartbeat.last_seq, heartbeat.census
        if heartbeat.last_seq < sequence.next_seq or sequence.waiting:
            self._behind = None
        elif self._behind is None or self._behind[1] < sequence.next_seq:
            self._behind = now, heartbeat.last_seq
        elif now - self._behind[0] >= self._grace_s:
            self._behind = None
            return True
        return False

    def may_compare(self, now: float, heartbeat: AgentHeartbeat, sequence: Sequence) -> bool:
        """Is it time to count, and would the two counts be of the same moment?"""
        same_moment = heartbeat.last_seq + 1 == sequence.next_seq and not sequence.waiting
        return same_moment and heartbeat.whole and now >= self._compare_at

    def differs(self, now: float, own: Census, heartbeat: AgentHeartbeat, sequence: Sequence) -> bool:
        """The outcome of a comparison that was due."""
        differs = own != heartbeat.census or sequence.state is not IndexState.LIVE
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S) if differs else self._interval_s
        self._compare_at = now + max(self._pause_s, own.blocks * SECONDS_PER_BLOCK)
        return differs
