"""What must hold after every scenario, whatever was injected. The soak's judge does it, from what was written down."""

from __future__ import annotations

import asyncio

from bench.soak.checker import History, judge
from bench.soak.clients import Sent
from bench.soak.watch import ask_text, until_quiet

from kvrelay.lab.replay.client import Outcome
from tests.edge.gateway.scripted import gauges_are_zero, receipts
from tests.scenarios.client import Seen
from tests.scenarios.stage import Stage

PROMISES = {
    "exactly one receipt per request",
    "the receipt's status is what the client saw",
    "no worker tried twice for one request",
    "all gauges 0 at the end",
    "metrics count what receipts count",
    "no error in the gateway's log",
}


async def assert_books_close(stage: Stage, *, tasks_at_rest: int, log: str) -> None:
    """One receipt and one terminal status per request, everything given back, nobody left running."""
    gateway = stage.gateway
    await stage.until(lambda: gauges_are_zero(gateway))
    await stage.until(lambda: len(asyncio.all_tasks()) <= tasks_at_rest)
    history = History(
        sent=[_sent(seen) for seen in stage.client.seen],
        receipts=receipts(gateway),
        deaths={},
        status_at_end=await until_quiet(gateway.admin_url, within_s=5.0),
        metrics_at_end=await ask_text(f"{gateway.admin_url}/metrics"),
        gateway_log=log,
    )
    verdicts = {each.promise: each for each in judge(history)}
    assert [each for name, each in verdicts.items() if name in PROMISES and each.verdict != "pass"] == []
    assert gateway.status().queue_depth == 0
    gateway.router.check()


def _sent(seen: Seen) -> Sent:
    """In the words of the soak. An answer that came whole and is no 200 is broken for a client, but whole for us."""
    sent = Sent(seen.request_id, session_id="", max_tokens=0, written=True)
    if not seen.left:
        failure = None if seen.complete and seen.status == 200 else "broken"
        sent.outcome = Outcome(sent_s=0.0, http_status=seen.status, failure=failure)
    return sent
