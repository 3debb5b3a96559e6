"""All checklists by stage, in the order in which an operator meets them."""

from __future__ import annotations

from kvrelay.core.checklist.beginner import BEGINNER
from kvrelay.core.checklist.deployment import PRELAUNCH
from kvrelay.core.checklist.item import Item
from kvrelay.core.checklist.operation import POSTLAUNCH
from kvrelay.core.checklist.red_flags import RED_FLAGS

STAGES: dict[str, tuple[Item, ...]] = {
    "beginner": BEGINNER,
    "prelaunch": PRELAUNCH,
    "postlaunch": POSTLAUNCH,
    "redflags": RED_FLAGS,
}
