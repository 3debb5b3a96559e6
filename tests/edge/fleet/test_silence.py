"""When a worker's silence is a problem: it computes, it should speak, and nothing is heard."""

from __future__ import annotations

from kvrelay.edge.connectors.base import Scrape
from kvrelay.edge.fleet.silence import SILENT_AFTER_TOKENS, EventSilence

ENOUGH = SILENT_AFTER_TOKENS


def scrape(queries: int | None, hits: int | None = 0) -> Scrape:
    return Scrape({}, prefix_queries_tokens=queries, prefix_hits_tokens=hits)


def problem_after(*observed: tuple[Scrape, bool]) -> str | None:
    silence = EventSilence()
    for one, heard in observed:
        silence.observe(one, heard=heard)
    return silence.problem


def test_what_a_worker_computed_before_we_came_says_nothing() -> None:
    assert problem_after((scrape(10 * ENOUGH), False), (scrape(10 * ENOUGH), False)) is None


def test_much_computed_and_nothing_heard_is_said_at_the_second_look() -> None:
    begin, later = (scrape(5), False), (scrape(5 + ENOUGH), False)
    assert problem_after(begin, later) is None
    assert problem_after(begin, later, later) == (
        f"it computed {ENOUGH} prompt tokens and not one event of it came; are `events` and `topic` right?"
    )


def test_hits_are_not_computed_and_an_event_ends_the_doubt() -> None:
    assert problem_after((scrape(0), False), *[(scrape(10 * ENOUGH, 10 * ENOUGH), False)] * 3) is None
    assert problem_after((scrape(0), False), *[(scrape(ENOUGH), False)] * 2, (scrape(ENOUGH), True)) is None


def test_an_engine_without_these_counters_is_not_suspected() -> None:
    assert problem_after(*[(scrape(None, None), False)] * 5) is None
