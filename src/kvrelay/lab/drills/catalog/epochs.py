"""Sessions that are over and namespaces of the past."""

from __future__ import annotations

from kvrelay.core.model.units import RouteReason, Trigger
from kvrelay.lab.drills import promises as hold
from kvrelay.lab.drills.actions import AddWorker, CloseSession, RemoveWorker, Rotate
from kvrelay.lab.drills.catalog.traffic import conversation, crowd, history
from kvrelay.lab.drills.drill import Do, Drill, Look, Promise, Send, Settle, Setup, Step, Turn, Wait, workers
from kvrelay.lab.drills.history import Finding, History, found

_SEED = 71
_ADAPTER = "ad-x"


def _not_revived(seen: History) -> Finding:
    receipt = seen.outcome("closed-3").receipt
    if receipt is None:
        return found(None, f"reasons are {hold.NOT_OBSERVED}")
    ok = receipt.route_reason is not RouteReason.STICKY_BOUND
    return found(ok, f"the turn after the close was routed by `{receipt.route_reason}`")


STALE_SESSION = Drill(
    name="stale-session",
    title="A session that was closed is used again",
    why="A sticky key must not bring a closed session back: the same id begins anew.",
    breaks="The session is closed on the admin port, then a client goes on under its id.",
    group="five",
    covers=("DR-11", "SG-22"),
    setup=Setup(workers=workers(3), policy="sticky"),
    steps=(
        Send((*conversation("closed", _SEED, 2, every_s=0.2), *crowd("others", 7, seed=72, over_s=0.2))),
        Do(CloseSession("closed")),
        Send(conversation("closed", _SEED, 1, first=2)),
        Wait(0.3),
        Look("end"),
    ),
    promises=(hold.all_ok(0), hold.all_ok(1), Promise("the closed session is not revived", _not_revived)),
)


def _first_meets_nothing(seen: History) -> Finding:
    return _hit(seen, "new-1", nothing=True)


def _second_meets_the_first(seen: History) -> Finding:
    return _hit(seen, "new-2", nothing=False)


def _hit(seen: History, turn: str, *, nothing: bool) -> Finding:
    outcome = seen.outcome(turn)
    claimed = None if outcome.receipt is None else outcome.receipt.matched_tokens_at_route
    if outcome.cached_tokens is None:
        return found(None, f"hits are {hold.NOT_OBSERVED}")
    ok = not outcome.cached_tokens and not claimed if nothing else outcome.cached_tokens > 0
    return found(ok, f"{turn}: {claimed} tokens claimed, {outcome.cached_tokens} hit")


def _one_epoch_each(seen: History) -> Finding:
    """Who was sent after the answer to the rotation is of the new epoch, who had ended before it of the old one."""
    deed = seen.deed("Rotate")
    known = [(o, o.receipt.epoch or "") for o in seen.outcomes if o.receipt is not None and o.sent_s is not None]
    if not known:
        return found(None, f"epochs are {hold.NOT_OBSERVED}")
    before = {epoch for o, epoch in known if o.ended_s is not None and o.ended_s < deed.at_s}
    after = {epoch for o, epoch in known if (o.sent_s or 0.0) > deed.done_s}
    observed = f"ended before: {sorted(before)}, sent after: {sorted(after)}"
    return found(not before & after and len(after) == 1, observed)


def old_retired(seen: History) -> Finding:
    """Whoever was there before and not named serves nobody who came later."""
    rotated_s = seen.deed("Rotate").done_s
    late = [o for o in seen.outcomes if (o.sent_s or 0.0) > rotated_s and o.worker is not None]
    if not late:
        return found(None, f"who served is {hold.NOT_OBSERVED}")
    old = [outcome.id for outcome in late if (outcome.worker or "").startswith("w")]
    return found(not old, f"{len(late)} requests after the rotation; on old workers: {old[:4] or 'none'}")


def _same_prompt(name: str, adapter: str | None, *, at_s: float = 0.0) -> Turn:
    return Turn(id=name, text=history(_SEED, 2), at_s=at_s, adapter=adapter, session=None)


def _rotation(trigger: Trigger) -> Drill:
    adapter = _ADAPTER if trigger is Trigger.ADAPTER else None
    new_software = trigger in (Trigger.REVISION, Trigger.TOKENIZER)
    rotate = Rotate(
        trigger,
        tenant="default" if trigger is Trigger.TENANT_POLICY else None,
        adapter=adapter,
        keep=("n0", "n1") if new_software else (),
    )
    revision = "v2" if trigger is Trigger.REVISION else ""
    arrivals: tuple[Step, ...] = ()
    if new_software:
        arrivals = (Do(AddWorker("n0", revision)), Do(AddWorker("n1", revision)), Settle())
    return Drill(
        name=f"rotation-{trigger.value.replace('_', '-')}",
        title=f"The {trigger.value.replace('_', ' ')} changes",
        why="KV from before the change has the right names and the wrong content. No later request may meet it, and no "
        "request may see both sides.",
        breaks=f"A rotation with trigger `{trigger.value}` in the middle of traffic"
        + (", with new workers beside the old ones." if new_software else "."),
        group="five",
        covers=("DR-11", "DR-12", "SG-19", *(("SG-20", "SG-21") if new_software else ())),
        setup=Setup(workers=workers(2, adapters=(_ADAPTER,))),
        steps=(
            Send((_same_prompt("old-1", adapter), _same_prompt("old-2", adapter, at_s=0.3))),
            *arrivals,
            Send(
                tuple(
                    Turn(id=turn.id, text=turn.text, at_s=turn.at_s, max_tokens=24, adapter=adapter)
                    for turn in crowd("across", 40, seed=73, over_s=0.3)
                ),
                blows=((0.1501, rotate),),
            ),
            Send((_same_prompt("new-1", adapter), _same_prompt("new-2", adapter, at_s=0.5))),
            Wait(0.3),
            Look("end"),
        ),
        promises=(
            hold.all_ok(0),
            hold.all_ok(1),
            hold.all_ok(2),
            Promise("the old prefix is not hit across the rotation", _first_meets_nothing),
            Promise("in the new epoch prefixes are hit again", _second_meets_the_first),
            Promise("every request is of one epoch", _one_epoch_each),
            *((Promise("old workers end what they have and get nothing more", old_retired),) if new_software else ()),
        ),
    )


ROTATIONS = tuple(_rotation(trigger) for trigger in Trigger)


def whole_revisions(seen: History) -> Finding:
    """Every answer is wholly of one revision, and after the rotation of the new one."""
    rotated_s = seen.deed("Rotate").done_s
    known = [outcome for outcome in seen.outcomes if outcome.text and len(outcome.texts) > 1]
    if not known:
        return found(None, f"the right answers are {hold.NOT_OBSERVED}")
    counted = dict.fromkeys(known[0].texts, 0)
    for outcome in known:
        for revision, right in outcome.texts.items():
            counted[revision] += outcome.text == right
    late_old = [o.id for o in known if (o.sent_s or 0.0) > rotated_s and o.text == o.texts.get("") != o.texts.get("v2")]
    observed = ", ".join(f"{count} of revision {revision or 'v1'}" for revision, count in counted.items())
    return found(not late_old, f"{observed}; old ones after the rotation: {late_old[:4] or 'none'}")


def _no_cross_hits(seen: History) -> Finding:
    """The first turn of each conversation after the rotation meets nothing of the old version."""
    firsts = [seen.outcome(f"talk{number}-3") for number in range(4)]
    if any(outcome.cached_tokens is None for outcome in firsts):
        return found(None, f"hits are {hold.NOT_OBSERVED}")
    hits = [outcome.cached_tokens for outcome in firsts]
    return found(not any(hits), f"tokens hit by the first turns on the new version: {hits}")


_TALKS = [conversation(f"talk{number}", 80 + number, 2, every_s=0.2) for number in range(4)]
_LATER = [conversation(f"talk{number}", 80 + number, 2, first=2, every_s=0.4) for number in range(4)]

ROLLING_UPDATE = Drill(
    name="rolling-update",
    title="A new version of the model takes over while clients go on",
    why="Two versions give blocks the same names. In a rolling update the KV of one must never be read by the other.",
    breaks="Two workers of a new revision join, the epoch is rotated under load, the two old workers are removed.",
    covers=("OP-04", "OP-10", "DR-15"),
    setup=Setup(workers=workers(2)),
    steps=(
        Send(tuple(turn for talk in _TALKS for turn in talk)),
        Do(AddWorker("n0", "v2")),
        Do(AddWorker("n1", "v2")),
        Settle(),
        Send(
            crowd("across", 60, seed=85, over_s=0.5, max_tokens=24),
            blows=((0.2501, Rotate(Trigger.REVISION, keep=("n0", "n1"))),),
        ),
        Send(tuple(turn for talk in _LATER for turn in talk)),
        Do(RemoveWorker("w0")),
        Do(RemoveWorker("w1")),
        Send(crowd("after", 40, seed=86, over_s=0.4)),
        Wait(0.5),
        Look("end", texts=(history(80, 4), history(81, 4))),
    ),
    promises=(
        hold.all_ok(0),
        hold.all_ok(1),
        hold.all_ok(2),
        hold.all_ok(3),
        Promise("no answer mixes versions, and none is old after the rotation", whole_revisions),
        Promise("no hit across versions", _no_cross_hits),
        Promise("old workers end what they have and get nothing more", old_retired),
        hold.everybody_serves(3),
    ),
)

DRILLS = (STALE_SESSION, *ROTATIONS, ROLLING_UPDATE)
