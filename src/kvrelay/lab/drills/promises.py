"""Promises that many drills make. Each is a function of the history, and none knows what was broken by whom.

A promise that cannot be looked at on a fleet is unknown there, and says what was missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from kvrelay.core.model.units import Fault, Status
from kvrelay.lab.drills.drill import Promise
from kvrelay.lab.drills.history import Finding, Held, History, Outcome, View, found

SHOWN = 4
UNWRITTEN_S = 0.5  # receipts are written in batches
NOT_OBSERVED = "not observed on this fleet"
_NO_REPLY = frozenset({Fault.CONNECT, Fault.CONNECT_TIMEOUT, Fault.BACK_PRESSURE})


def named(outcomes: Iterable[Outcome]) -> str:
    names = [outcome.id for outcome in outcomes]
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


# --- for every drill -------------------------------------------------------------------------------------------------


def _one_end(history: History) -> Finding:
    without = [outcome for outcome in history.outcomes if outcome.ending == "none"]
    counted = Counter(outcome.ending for outcome in history.outcomes)
    seen = ", ".join(f"{count} {ending}" for ending, count in counted.most_common())
    if without:
        return found(False, f"no end of {named(without)}; {seen}")
    return found(True, f"{len(history.outcomes)} requests: {seen}")


def _one_receipt(history: History) -> Finding:
    known = [outcome for outcome in history.outcomes if outcome.receipts is not None]
    if not known:
        return found(None, f"receipts are {NOT_OBSERVED}")
    wrong = [outcome for outcome in known if outcome.receipts != 1 and not _went_with_the_gateway(outcome, history)]
    differing = [outcome for outcome in known if outcome.receipt is not None and not _agrees(outcome)]
    if wrong or differing:
        return found(
            False, f"not exactly one receipt: {named(wrong) or 'none'}; status differs: {named(differing) or 'none'}"
        )
    gone = sum(outcome.receipts == 0 for outcome in known)
    observed = f"{len(known) - gone} requests, each with one receipt that says what its client saw"
    return found(True, observed + (f"; {gone} went with the gateway" if gone else ""))


def _went_with_the_gateway(outcome: Outcome, history: History) -> bool:
    """A gateway that is killed takes the receipts with it that it has not written, of requests that it has open too."""
    kills = [deed.at_s for deed in history.deeds if deed.kind == "RestartGateway"]
    ended_s = outcome.ended_s
    unwritten = ended_s is not None and any(at_s - UNWRITTEN_S <= ended_s <= at_s + UNWRITTEN_S for at_s in kills)
    return outcome.receipts == 0 and (outcome.ending == "gateway_lost" or unwritten)


def _agrees(outcome: Outcome) -> bool:
    assert outcome.receipt is not None
    status = outcome.receipt.status
    match outcome.ending:
        case "ok":
            return status is Status.OK
        case "refused":
            return status not in (Status.OK, Status.CLIENT_CANCELLED)
        case "broken":
            return status in (Status.WORKER_LOST, Status.TIMEOUT, Status.ERROR)
        case _:
            return True


def _right_texts(history: History) -> Finding:
    known = [outcome for outcome in history.outcomes if outcome.text is not None and outcome.texts]
    reused = [outcome for outcome in history.outcomes if outcome.wrong_reuse_blocks]
    if not known:
        return found(None, f"the right answers are {NOT_OBSERVED}")
    wrong = [outcome for outcome in known if not _is_right(outcome)]
    if wrong or reused:
        return found(False, f"wrong text: {named(wrong) or 'none'}; foreign blocks read: {named(reused) or 'none'}")
    return found(True, f"{len(known)} answers, every one as by an engine that knows nothing else")


def _is_right(outcome: Outcome) -> bool:
    """Whole answers are equal to a right one, broken ones are the beginning of one."""
    assert outcome.text is not None
    if outcome.ending == "ok":
        return outcome.text in outcome.texts.values()
    return any(right.startswith(outcome.text) for right in outcome.texts.values())


def _bounded_retries(history: History) -> Finding:
    receipts = [outcome.receipt for outcome in history.outcomes if outcome.receipt is not None]
    if not receipts or history.retry_attempts is None:
        return found(None, f"attempts are {NOT_OBSERVED}")
    most = max(len(receipt.attempts) for receipt in receipts)
    twice = [r.request_id for r in receipts if len({a.worker for a in r.attempts}) < len(r.attempts)]
    ok = most <= history.retry_attempts and not twice
    return found(
        ok, f"at most {most} of {history.retry_attempts} attempts; twice on one worker: {twice[:SHOWN] or 'none'}"
    )


def _books_closed(history: History) -> Finding:
    last = history.views[-1] if history.views else None
    if last is None or last.live_requests is None:
        return found(None, f"the gateway's books are {NOT_OBSERVED}")
    booked = {worker.name: worker.active_requests for worker in last.workers if worker.active_requests}
    return found(not booked and not last.live_requests, f"{last.live_requests} live, booked: {booked or 'nothing'}")


GENERAL = (
    Promise("every request ends exactly once", _one_end),
    Promise("every request has exactly one receipt, which says what its client saw", _one_receipt),
    Promise("no answer was made with KV that is not its own", _right_texts),
    Promise("attempts are bounded, and never twice on one worker", _bounded_retries),
    Promise("at the end nothing is booked", _books_closed),
)


# --- for some --------------------------------------------------------------------------------------------------------


def all_ok(step: int, *, but: tuple[str, ...] = ()) -> Promise:
    """Every turn of a `Send` ends well."""

    def judge(history: History) -> Finding:
        turns = [outcome for outcome in history.of_step(step) if outcome.id not in but]
        failed = [outcome for outcome in turns if outcome.ending != "ok"]
        observed = f"{len(turns) - len(failed)} of {len(turns)} ended well"
        return found(not failed, observed if not failed else f"{observed}; not: {named(failed)}")

    return Promise(f"all requests of part {step + 1} end well", judge)


def only_begun_may_break(step: int) -> Promise:
    """A stream that had begun on a worker that was lost may break. Everything else is tried elsewhere and ends well."""

    def judge(history: History) -> Finding:
        turns = history.of_step(step)
        lost = [outcome for outcome in turns if outcome.ending not in ("ok", "broken")]
        unbegun = [outcome for outcome in turns if outcome.ending == "broken" and not outcome.text]
        broken = sum(outcome.ending == "broken" for outcome in turns)
        observed = f"{len(turns)} requests, {broken} broken after their first token"
        ok = not lost and not unbegun
        return found(ok, observed if ok else f"{observed}; lost without need: {named([*lost, *unbegun])}")

    return Promise(f"of part {step + 1} only streams break that had begun", judge)


def served_elsewhere(turn: str, kind: str) -> Promise:
    """The turn is not served by the life of the worker that was struck."""

    def judge(history: History) -> Finding:
        deed, outcome = history.deed(kind), history.outcome(turn)
        if outcome.worker is None:
            return found(None, f"who served {turn} is {NOT_OBSERVED}")
        elsewhere = outcome.worker != deed.worker
        return found(
            outcome.ending == "ok" and elsewhere, f"{deed.action}; {turn} {outcome.ending} on {outcome.worker}"
        )

    return Promise(f"{turn} is served by another worker", judge)


def claims_are_true(label: str, *, slack_blocks: int = 1) -> Promise:
    """What the gateway claims is there, and what is there is claimed. One block may differ: the prompt's last one."""
    return Promise(
        f"claims equal the truth ({label})", lambda history: _compare(history, label, slack_blocks, both=True)
    )


def claims_are_safe(label: str, *, slack_blocks: int = 1) -> Promise:
    """Nothing is claimed that is not there; hits may be missed."""
    return Promise(
        f"nothing is claimed that is not there ({label})",
        lambda history: _compare(history, label, slack_blocks, both=False),
    )


def claims_are_wrong(label: str) -> Promise:
    """For what cannot be seen yet: the drill must show that its blow struck, else it proves nothing."""

    def judge(history: History) -> Finding:
        pairs = _pairs(history.view(label))
        if not pairs:
            return found(None, f"claims and truth are {NOT_OBSERVED}")
        differing = [held for held in pairs if _gap(held) > history.block_size_tokens]
        return found(
            bool(differing), f"{len(differing)} of {len(pairs)} claims differ from the truth: undetectable so far"
        )

    return Promise(f"the loss cannot be seen yet ({label})", judge)


def _pairs(view: View) -> list[Held]:
    return [held for held in view.held if held.claimed is not None and held.real is not None]


def _gap(held: Held) -> int:
    assert held.claimed is not None and held.real is not None
    return abs(held.claimed - held.real)


def _compare(history: History, label: str, slack_blocks: int, *, both: bool) -> Finding:
    pairs = _pairs(history.view(label))
    if not pairs:
        return found(None, f"claims and truth are {NOT_OBSERVED}")
    slack = slack_blocks * history.block_size_tokens
    over = [held for held in pairs if (held.claimed or 0) > (held.real or 0) + slack]
    under = [held for held in pairs if (held.claimed or 0) + slack < (held.real or 0)] if both else []
    total = sum(held.real or 0 for held in pairs)
    wrong = [f"{held.worker} text {held.text}: claimed {held.claimed}, real {held.real}" for held in (*over, *under)]
    observed = f"{len(pairs)} claims, {total} tokens really held"
    return found(not wrong, observed if not wrong else "; ".join(wrong[:SHOWN]))


def nothing_claimed(label: str, worker_of: Callable[[History], str | None]) -> Promise:
    """The gateway believes that this worker holds none of the texts."""

    def judge(history: History) -> Finding:
        worker = worker_of(history)
        claims = [held for held in history.view(label).held if held.worker == worker and held.claimed is not None]
        if not claims:
            return found(None, f"claims of {worker} are {NOT_OBSERVED}")
        return found(
            not any(held.claimed for held in claims), f"{worker}: {[held.claimed for held in claims]} tokens claimed"
        )

    return Promise(f"nothing of a former life is claimed ({label})", judge)


def everybody_serves(step: int) -> Promise:
    """Every worker that the last view calls routable took some of a `Send`'s traffic."""

    def judge(history: History) -> Finding:
        served = Counter(outcome.worker for outcome in history.of_step(step) if outcome.ending == "ok")
        if None in served and len(served) == 1:
            return found(None, f"who served is {NOT_OBSERVED}")
        routable = [worker.name for worker in history.views[-1].workers if worker.routable] if history.views else []
        if not routable:
            return found(None, f"who is routable is {NOT_OBSERVED}")
        idle = [name for name in routable if not served.get(name)]
        shares = ", ".join(f"{name} {served.get(name, 0)}" for name in routable)
        return found(not idle, f"{shares}" + (f"; without any: {idle}" if idle else ""))

    return Promise(f"all healthy workers take traffic again (part {step + 1})", judge)


def recovered(number: int = 0) -> Promise:
    """The number-th `Settle` came about."""

    def judge(history: History) -> Finding:
        settled = history.settled[number]
        if settled.after_s is None:
            return found(False, f"not within the time: {', '.join(settled.wanted)}")
        return found(True, f"after {settled.after_s:.2f} s of the fleet's clock")

    return Promise("the fleet is whole again in time", judge)


def reported(kind: str, label: str, *, at_least: int = 1, at_most: int | None = None) -> Promise:
    """An operator could see it: the gateway counts events of this kind."""

    def judge(history: History) -> Finding:
        reports = history.view(label).reports
        if reports is None:
            return found(None, f"reports are {NOT_OBSERVED}")
        count = reports.get(kind, 0)
        ok = count >= at_least and (at_most is None or count <= at_most)
        return found(ok, f"{kind}: {count}")

    bound = f"at least {at_least}" if at_most is None else f"{at_least} to {at_most}"
    return Promise(f"`{kind}` is reported ({bound})", judge)


def index_state(label: str, worker: str, state: str) -> Promise:
    def judge(history: History) -> Finding:
        seen = history.view(label).worker(worker)
        if seen is None or seen.index_state is None:
            return found(None, f"the index of {worker} is {NOT_OBSERVED}")
        return found(seen.index_state == state, f"{worker}: {seen.index_state}, {seen.index_blocks} blocks")

    return Promise(f"the index of {worker} says `{state}` ({label})", judge)
