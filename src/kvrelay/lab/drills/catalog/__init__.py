"""All drills, by name."""

from __future__ import annotations

from kvrelay.lab.drills.catalog import epochs, index, load, network, rollback, skew, store, tenants, worker_loss
from kvrelay.lab.drills.drill import Drill

ALL: dict[str, Drill] = {
    drill.name: drill
    for module in (worker_loss, skew, index, store, epochs, tenants, load, network, rollback)
    for drill in module.DRILLS
}
