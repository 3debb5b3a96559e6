"""Several tenants in one fleet, while it changes under them."""

from __future__ import annotations

from msgspec.structs import replace

from kvrelay.core.model.units import Trigger
from kvrelay.lab.drills import promises as hold
from kvrelay.lab.drills.actions import AddWorker, RemoveWorker, Rotate
from kvrelay.lab.drills.catalog.epochs import old_retired, whole_revisions
from kvrelay.lab.drills.catalog.traffic import conversation, crowd
from kvrelay.lab.drills.drill import Do, Drill, Look, Promise, Send, Settle, Setup, StorePlan, Turn, Wait, workers
from kvrelay.lab.drills.history import Finding, History, found

TENANTS = ("red", "blue")
_TALKS, _SEED = 3, 170
_PART = {"old": 0, "new": 2}  # first turn on the old version, and on the new one


def _talks(tenant: str, part: str, begins_s: float) -> tuple[Turn, ...]:
    """Two turns of each conversation. All tenants say the same, word for word."""
    turns: list[Turn] = []
    for number in range(_TALKS):
        said = conversation(f"{tenant}{number}", _SEED + number, 2, first=_PART[part], every_s=0.5)
        turns += [replace(turn, tenant=tenant, at_s=begins_s + turn.at_s) for turn in said]
    return tuple(turns)


def _all_talks(part: str) -> tuple[Turn, ...]:
    """One tenant after the other, so that who comes later could meet what the one before left."""
    return tuple(turn for place, tenant in enumerate(TENANTS) for turn in _talks(tenant, part, 1.5 * place))


def _rush(name: str, count: int, seed: int) -> tuple[Turn, ...]:
    turns = crowd(name, count, seed=seed, over_s=0.5, max_tokens=16)
    return tuple(replace(turn, tenant=TENANTS[number % len(TENANTS)]) for number, turn in enumerate(turns))


def _hits(seen: History, part: str, turn: int) -> dict[str, int | None]:
    number = _PART[part] + turn
    return {
        f"{tenant}{talk}-{number}": seen.outcome(f"{tenant}{talk}-{number}").cached_tokens
        for tenant in TENANTS
        for talk in range(_TALKS)
    }


def _nothing_of_others(seen: History) -> Finding:
    """The first turns on a version: whoever said the same before was another tenant, or on the other version."""
    hits = _hits(seen, "old", 1) | _hits(seen, "new", 1)
    if None in hits.values():
        return found(None, f"hits are {hold.NOT_OBSERVED}")
    foreign = {turn: tokens for turn, tokens in hits.items() if tokens}
    return found(not foreign, f"{len(hits)} first turns of a tenant on a version; tokens hit: {foreign or 'none'}")


def _own_is_found(seen: History) -> Finding:
    hits = _hits(seen, "old", 2) | _hits(seen, "new", 2)
    if None in hits.values():
        return found(None, f"hits are {hold.NOT_OBSERVED}")
    return found(all(hits.values()), f"tokens hit by second turns: {list(hits.values())}")


def _under_its_own_name(seen: History) -> Finding:
    """A receipt names the tenant of the credential that the request came with."""
    known = [(outcome, outcome.receipt) for outcome in seen.outcomes if outcome.receipt is not None]
    if not known:
        return found(None, f"tenants are {hold.NOT_OBSERVED}")
    wrong = [outcome.id for outcome, receipt in known if receipt.tenant != outcome.tenant]
    return found(not wrong, f"{len(known)} receipts; with another tenant: {wrong[:4] or 'none'}")


ROLLING_UPDATE_TENANTS = Drill(
    name="rolling-update-tenants",
    title="A new version takes over while several tenants say the same",
    why="In a rolling update three things separate KV at once: the version, the epoch and the tenant. Each must hold.",
    breaks="As `rolling-update`, with a shared tier, and two tenants who send the same prompts.",
    covers=("OP-10", "OP-04", "DR-15", "SG-20"),
    setup=Setup(workers=workers(2), store=StorePlan(), tenants=TENANTS),
    steps=(
        Send(_all_talks("old")),
        Do(AddWorker("n0", "v2")),
        Do(AddWorker("n1", "v2")),
        Settle(),
        Send(_rush("across", 60, 175), blows=((0.2501, Rotate(Trigger.REVISION, keep=("n0", "n1"))),)),
        Send(_all_talks("new")),
        Do(RemoveWorker("w0")),
        Do(RemoveWorker("w1")),
        Send(_rush("after", 40, 176)),
        Wait(0.5),
        Look("end"),
    ),
    promises=(
        hold.all_ok(0),
        hold.all_ok(1),
        hold.all_ok(2),
        hold.all_ok(3),
        Promise("nothing of another tenant is hit, nor of the other version", _nothing_of_others),
        Promise("every tenant finds its own again", _own_is_found),
        Promise("every receipt names the tenant of the credential", _under_its_own_name),
        Promise("no answer mixes versions, and none is old after the rotation", whole_revisions),
        Promise("old workers end what they have and get nothing more", old_retired),
        hold.everybody_serves(3),
    ),
)

DRILLS = (ROLLING_UPDATE_TENANTS,)
