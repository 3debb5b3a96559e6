"""All rules, in the order of the report. The command, the guide and alerts share them."""

from __future__ import annotations

from kvrelay.core.doctor.engine_rules import ENGINE_RULES
from kvrelay.core.doctor.event_rules import EVENT_RULES
from kvrelay.core.doctor.finding import FleetRule, WorkerRule
from kvrelay.core.doctor.fleet_rules import FLEET_RULES
from kvrelay.core.doctor.gateway_rules import GATEWAY_RULES
from kvrelay.core.doctor.kv_rules import KV_RULES
from kvrelay.core.doctor.window_rules import WINDOW_RULES

RULES: tuple[WorkerRule | FleetRule, ...] = (
    *ENGINE_RULES,
    *EVENT_RULES,
    *KV_RULES,
    *FLEET_RULES,
    *GATEWAY_RULES,
    *WINDOW_RULES,
)
