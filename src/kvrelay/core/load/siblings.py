"""What the other processes of this gateway have booked, by process and slot."""

from __future__ import annotations

from collections.abc import Mapping

from kvrelay.core.model.siblings import SiblingLoad

Booked = tuple[int, int, int, int]  # active requests, queued requests, active prefill tokens, active decode blocks


class SiblingLoads:
    """The last word of every sibling."""

    def __init__(self) -> None:
        self._loads: dict[int, dict[int, SiblingLoad]] = {}  # sibling -> slot -> load
        self.prefilling_requests = 0  # over all siblings and slots

    def of(self, slot: int) -> Booked:
        """The sum over all siblings."""
        active = queued = prefill_tokens = decode_blocks = 0
        for loads in self._loads.values():
            load = loads.get(slot)
            if load is not None:
                active += load.active_requests
                queued += load.queued_requests
                prefill_tokens += load.active_prefill_tokens
                decode_blocks += load.active_decode_blocks
        return active, queued, prefill_tokens, decode_blocks

    def replace(self, sibling: int, loads: Mapping[int, SiblingLoad]) -> list[tuple[int, int]]:
        """Take a sibling's new word; answers the slots that changed, each with the tokens prefilled since.

        A slot that the sibling spoke of for the first time, or after a new start, tells of no progress.
        """
        before = self._loads.pop(sibling, {})
        if loads:
            self._loads[sibling] = dict(loads)
        self._count()
        changed: list[tuple[int, int]] = []
        for slot in dict.fromkeys((*before, *loads)):
            old, new = before.get(slot), loads.get(slot)
            if old == new:
                continue
            done_tokens = new.prefilled_tokens - old.prefilled_tokens if old is not None and new is not None else 0
            changed.append((slot, max(0, done_tokens)))
        return changed

    def forget(self, slot: int) -> None:
        """The slot is somebody else's now."""
        for loads in self._loads.values():
            loads.pop(slot, None)
        self._count()

    def _count(self) -> None:
        """Looked at for every decision, changed a few times a second."""
        self.prefilling_requests = sum(
            load.queued_requests for loads in self._loads.values() for load in loads.values()
        )
