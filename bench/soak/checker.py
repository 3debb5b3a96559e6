"""Who judges: sees only what was written down, and says pass, fail or unknown for each promise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Literal

import msgspec

from bench.soak.clients import Sent
from bench.soak.nemesis import OWN_DEATH_STATUS, Death
from bench.soak.watch import Moment, gauges
from kvrelay.core.model.units import Status
from kvrelay.core.receipts.receipt import Receipt
from kvrelay.core.receipts.reconcile import reconcile
from kvrelay.edge.observe.metrics_join import compare, totals_of_page

SHOWN = 5
CONVERGED_RATIO = 0.95
RSS_GROWTH = 1.10
SPARE_FDS = 3  # probes and a scrape may be under way at any moment
REFUSED_BY_ALL_RATIO, REFUSED_BY_ALL_LEAST = 0.001, 2  # the faults' own chance is far below
HARSH_REFUSED_BY_ALL_RATIO = 0.01  # 0.1 cubed for three workers, and all that is in flight when connections are cut
# Reasons that are nobody's fault; there are as many attempts as workers.
_NOBODY_LEFT = {"all_tried", "attempts_used_up", "no_worker_alive", "all_draining"}
_DEAD_WORKER, _REFUSED_BY_ALL = "begun on a worker that was killed or died", "refused by every worker there was"
EXPECTED_EXIT = {"killed": -9, "terminated": 0, "died": OWN_DEATH_STATUS}


class Verdict(msgspec.Struct, frozen=True):
    """One promise."""

    promise: str
    verdict: Literal["pass", "fail", "unknown"]
    observed: str


class History(msgspec.Struct, kw_only=True):
    """All that a run leaves behind."""

    sent: Sequence[Sent]
    receipts: Sequence[Receipt]
    deaths: Mapping[str, Death]
    status_at_end: dict[str, Any]
    metrics_at_end: str
    repeated: frozenset[str] = frozenset()  # requests whose claims must have converged
    wrong_reuse_blocks: int | None = None
    gateway_log: str | None = None
    moments: Sequence[Moment] = ()
    warm_up_s: float = 0.0
    refused_by_all_ratio: float = REFUSED_BY_ALL_RATIO
    migrates: bool = False  # with `retry.migrate` a dead worker excuses nothing
    fds_at_rest: int | None = None
    fds_at_end: int | None = None


def judge(history: History) -> list[Verdict]:
    by_id = {receipt.request_id: receipt for receipt in history.receipts}
    return [
        _one_receipt_each(history, by_id),
        _one_status_each(history, by_id),
        _nothing_lost(history, by_id),
        _whole_answers(history, by_id),
        _right_texts(history),
        _no_worker_twice(history),
        _gauges_are_zero(history),
        _metrics_agree(history),
        _claims_converged(history, by_id),
        _no_wrong_reuse(history),
        _workers_died_as_planned(history),
        _clean_log(history),
        _flat_memory(history),
        _descriptors_returned(history),
    ]


def _one_receipt_each(history: History, by_id: Mapping[str, Receipt]) -> Verdict:
    asked = {sent.request_id for sent in history.sent if sent.written}
    twice = [name for name, count in Counter(receipt.request_id for receipt in history.receipts).items() if count > 1]
    missing = [name for name in asked if name not in by_id]
    surplus = [name for name in by_id if name not in asked]
    observed = f"{len(asked)} requests written, {len(history.receipts)} receipts"
    wrong = [f"{len(them)} {what}: {them[:SHOWN]}" for what, them in _named(missing, twice, surplus) if them]
    return _verdict("exactly one receipt per request", not wrong, "; ".join([observed, *wrong]))


def _named(missing: list[str], twice: list[str], surplus: list[str]) -> list[tuple[str, list[str]]]:
    return [("without", missing), ("twice", twice), ("nobody sent", surplus)]


def _one_status_each(history: History, by_id: Mapping[str, Receipt]) -> Verdict:
    counts = Counter(receipt.status.value for receipt in history.receipts)
    wrong = [
        f"{sent.request_id}: client saw {_seen(sent)}, receipt says {by_id[sent.request_id].status}"
        for sent in history.sent
        if sent.request_id in by_id and not _agree(sent, by_id[sent.request_id])
    ]
    observed = ", ".join(f"{status} {count}" for status, count in counts.most_common())
    return _verdict("the receipt's status is what the client saw", not wrong, "; ".join([observed, *wrong[:SHOWN]]))


def _seen(sent: Sent) -> str:
    if sent.outcome is None:
        return "nothing more (it left)"
    return f"HTTP {sent.outcome.http_status}, {sent.outcome.failure or 'complete'}"


def _agree(sent: Sent, receipt: Receipt) -> bool:
    if sent.outcome is None:  # it may have left in the moment in which the answer ended, well or badly
        return True
    if not sent.broken:
        return receipt.status is Status.OK and receipt.http_status == 200
    if sent.begun:
        return receipt.status in (Status.WORKER_LOST, Status.TIMEOUT)
    return receipt.status is not Status.OK and receipt.http_status == sent.outcome.http_status


def _nothing_lost(history: History, by_id: Mapping[str, Receipt]) -> Verdict:
    """Only a stream that had begun on a worker that died without draining may break, unless streams migrate, and a
    request that every worker was asked to take and that an injected fault struck on each of them may be refused."""
    broken = Counter(_why_broken(sent, by_id.get(sent.request_id), history) for sent in history.sent if sent.broken)
    lost = [sent for sent in history.sent if sent.broken and not _why_broken(sent, by_id.get(sent.request_id), history)]
    wrong = [f"{sent.request_id}: {_seen(sent)}, {_attempts(by_id.get(sent.request_id))}" for sent in lost[:SHOWN]]
    excused = [f"{count} {why}" for why, count in broken.items() if why]
    ok = not lost and broken[_REFUSED_BY_ALL] <= max(
        REFUSED_BY_ALL_LEAST, len(history.sent) * history.refused_by_all_ratio
    )
    return _verdict("no request lost beyond these", ok, "; ".join([f"{len(lost)} lost", *excused, *wrong]))


def _why_broken(sent: Sent, receipt: Receipt | None, history: History) -> str:
    """Empty: for no reason that would be one."""
    if receipt is None:
        return ""
    if sent.begun and not history.migrates:
        return _DEAD_WORKER if _on_dead_worker(receipt, history.deaths) else ""
    if sent.begun:
        because = receipt.not_migrated_because
    else:
        because = receipt.not_retried_because if receipt.attempts else receipt.failure_reason
    return _REFUSED_BY_ALL if because in _NOBODY_LEFT else ""


def _on_dead_worker(receipt: Receipt, deaths: Mapping[str, Death]) -> bool:
    death = deaths.get(receipt.incarnation or "")
    return death is not None and death.how != "terminated"


def _attempts(receipt: Receipt | None) -> str:
    if receipt is None:
        return "no receipt"
    tries = [f"{each.worker} {each.fault} {each.http_status or ''} {each.detail or ''}" for each in receipt.attempts]
    because = receipt.not_retried_because or receipt.not_migrated_because
    return f"{receipt.failure_reason}, nobody else because {because}: " + ", ".join(tries)


def _whole_answers(history: History, by_id: Mapping[str, Receipt]) -> Verdict:
    """No token missing and none twice, and the receipt counts what the client got."""
    whole = [each for each in history.sent if each.outcome is not None and not each.broken and each.request_id in by_id]
    wrong = []
    for sent in whole:
        assert sent.outcome is not None
        tokens, counted = len(sent.outcome.token_times_s), by_id[sent.request_id].completion_tokens
        if not tokens == sent.max_tokens == counted:
            wrong.append(f"{sent.request_id}: asked for {sent.max_tokens}, got {tokens}, receipt says {counted}")
    observed = f"{len(whole)} complete answers, {len(wrong)} with other tokens than asked for"
    return _verdict("complete answers are whole", not wrong, "; ".join([observed, *wrong[:SHOWN]]))


def _right_texts(history: History) -> Verdict:
    """The engine's text is a function of all tokens before: wrong KV, or a seam in the wrong place, changes it."""
    promise = "every complete answer says what an undisturbed worker says"
    known = [sent for sent in history.sent if sent.right_text is not None]
    if not known:
        return Verdict(promise, "unknown", "nothing to compare")
    wrong = [sent.request_id for sent in known if not sent.right_text]
    migrated = [receipt for receipt in history.receipts if receipt.migrations]
    observed = f"{len(known)} compared, {len(migrated)} of all were migrated, {len(wrong)} differ"
    return _verdict(promise, not wrong, "; ".join([observed, *wrong[:SHOWN]]))


def _no_worker_twice(history: History) -> Verdict:
    retried = [receipt for receipt in history.receipts if len(receipt.attempts) > 1]
    wrong = [
        receipt.request_id
        for receipt in retried
        if len({attempt.worker for attempt in receipt.attempts}) < len(receipt.attempts)
    ]
    faults = Counter(
        str(attempt.fault) for receipt in history.receipts for attempt in receipt.attempts if attempt.fault
    )
    observed = f"{len(retried)} retried ({', '.join(f'{name} {count}' for name, count in faults.most_common())})"
    return _verdict("no worker tried twice for one request", not wrong, "; ".join([observed, *wrong[:SHOWN]]))


def _gauges_are_zero(history: History) -> Verdict:
    wrong = [f"{name} {value}" for name, value in gauges(history.status_at_end).items() if value]
    workers = len(history.status_at_end["workers"])
    return _verdict("all gauges 0 at the end", not wrong, "; ".join([f"{workers} workers", *wrong]))


def _metrics_agree(history: History) -> Verdict:
    compared = compare(history.receipts, totals_of_page(history.metrics_at_end))
    wrong = [each for each in compared if each.verdict == "fail"]
    if not wrong and any(each.verdict == "unknown" for each in compared):
        return Verdict("metrics count what receipts count", "unknown", "a counter is missing")
    requests = next(each for each in compared if each.metric == "kvrelay_requests_total")
    exact = requests.receipts_total == requests.metrics_total
    observed = [f"{each.metric}: receipts {each.receipts_total}, metrics {each.metrics_total}" for each in wrong]
    return _verdict(
        "metrics count what receipts count",
        exact and not wrong,
        "; ".join([f"{requests.receipts_total:g} and {requests.metrics_total:g} requests", *observed]),
    )


def _claims_converged(history: History, by_id: Mapping[str, Receipt]) -> Verdict:
    promise = f"after healing, claimed = actual within a block for {CONVERGED_RATIO:.0%}"
    repeated = reconcile(by_id[name] for name in history.repeated if name in by_id)
    if not repeated.compared:
        return Verdict(promise, "unknown", "no receipt has both sides")
    ratio = repeated.within_one_block / repeated.compared
    observed = (
        f"{repeated.within_one_block} of {repeated.compared}; claimed {repeated.claimed_tokens},"
        f" actual {repeated.actual_tokens}, eligible {repeated.eligible_tokens} tokens"
    )
    return _verdict(promise, ratio >= CONVERGED_RATIO, observed)


def _no_wrong_reuse(history: History) -> Verdict:
    count = history.wrong_reuse_blocks
    if count is None:
        return Verdict("no wrong KV reused", "unknown", "not asked")
    return _verdict("no wrong KV reused", count == 0, f"{count} blocks")


def _workers_died_as_planned(history: History) -> Verdict:
    counts = Counter(death.how for death in history.deaths.values())
    wrong = [
        f"{death.worker} {death.how} with exit status {death.exit_status}"
        for death in history.deaths.values()
        if death.exit_status != EXPECTED_EXIT[death.how]
    ]
    observed = ", ".join(f"{how} {count}" for how, count in counts.most_common()) or "none"
    return _verdict("workers ended only as planned", not wrong, "; ".join([observed, *wrong[:SHOWN]]))


def _clean_log(history: History) -> Verdict:
    promise = "no error in the gateway's log"
    if history.gateway_log is None:
        return Verdict(promise, "unknown", "no log")
    lines = history.gateway_log.splitlines()
    wrong = [line for line in lines if "Traceback" in line or " ERROR " in line or " CRITICAL " in line]
    return _verdict(promise, not wrong, "; ".join([f"{len(lines)} lines, {len(wrong)} errors", *wrong[:SHOWN]]))


def _flat_memory(history: History) -> Verdict:
    """The median of the first third after the warm-up against the last third's."""
    promise = "memory flat within 10 % after the warm-up"
    if not history.moments:
        return Verdict(promise, "unknown", "not watched")
    began_s = history.moments[0].at_s
    warm = [moment.rss_mb for moment in history.moments if moment.at_s >= began_s + history.warm_up_s]
    third = len(warm) // 3
    if third < 5:
        return Verdict(promise, "unknown", f"{len(warm)} samples after the warm-up are too few")
    first, last = median(warm[:third]), median(warm[-third:])
    observed = f"{first:.1f} MB then {last:.1f} MB ({last / first - 1:+.1%}), peak {max(warm):.1f} MB"
    return _verdict(promise, last <= first * RSS_GROWTH, observed)


def _descriptors_returned(history: History) -> Verdict:
    promise = "no socket or descriptor left open"
    if history.fds_at_rest is None or history.fds_at_end is None:
        return Verdict(promise, "unknown", "not watched")
    peak = max((moment.open_fds for moment in history.moments), default=0)
    observed = f"{history.fds_at_rest} before, {peak} at the peak, {history.fds_at_end} after"
    return _verdict(promise, history.fds_at_end <= history.fds_at_rest + SPARE_FDS, observed)


def _verdict(promise: str, ok: bool, observed: str) -> Verdict:
    return Verdict(promise, "pass" if ok else "fail", observed)
