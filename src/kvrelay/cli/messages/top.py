"""What `kvrelay top` writes. What is not known is unavailable, never 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvrelay.edge.observe.runbook import told
from kvrelay.edge.observe.windows import FourNumbers

UNAVAILABLE = "unavailable"
NO_TROUBLE = "no trouble"


def headline(picture: Mapping[str, Any]) -> str:
    gateway = picture["gateway"]
    scorer = f" ({gateway['scorer']})" if gateway["scorer"] else ""
    draining = ", draining" if gateway["draining"] else ""
    return (
        f"kvrelay {gateway['version']}, policy {gateway['policy']}{scorer}, up {gateway['uptime_s']:.0f} s, "
        f"{gateway['open_requests']} open, {gateway['queue_depth']} waiting{draining}"
    )


def numbers(values: Mapping[str, Any]) -> str:
    return "   ".join(told(msgspec.convert(values, FourNumbers)))


def count(value: float | None) -> str:
    return UNAVAILABLE if value is None else f"{value:,.0f}"


def ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"
