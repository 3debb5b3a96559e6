"""What the reports of several prompts of one request add up to."""

from __future__ import annotations

from msgspec import structs

from kvrelay.edge.worker.kv_loads import REMEMBERED, Load, LoadReports

HIT = Load("hit", None, 512, 4096, {"lookup": 1.0, "fetch": 2.0}, 3.0, 60.0, {"cluster": 512})
ABSENT = Load("none", "absent", 0, 0, {"lookup": 1.5}, None, 20.0, {})


def test_several_prompts_add_up_and_the_first_that_did_not_hit_gives_the_outcome() -> None:
    reports = LoadReports()
    reports.note("1-0-0", HIT)
    reports.note("1-1-0", ABSENT)
    told = reports.tell("mine", ["1-0-0", "1-1-0"], cached_tokens=528)
    assert told == reports.find("mine")
    assert told is not None
    assert (told["outcome"], told["reason"], told["loaded_tokens"], told["bytes_read"]) == ("none", "absent", 512, 4096)
    assert told["ms"] == {"lookup": 2.5, "fetch": 2.0}
    assert (told["predicted_fetch_ms"], told["predicted_recompute_ms"]) == (None, 80.0), "a part of a sum is no sum"
    assert told["tokens_by_scope"] == {"cluster": 512, "engine": 16}


def test_nothing_noted_is_nothing_told() -> None:
    reports = LoadReports()
    reports.note("1-0-0", HIT)
    reports.forget(["1-0-0"])
    assert reports.tell("mine", ["1-0-0"], cached_tokens=0) is None and reports.find("mine") is None


def test_only_the_last_ones_are_remembered() -> None:
    reports = LoadReports()
    for number in range(REMEMBERED + 2):
        reports.note(str(number), structs.replace(HIT, tokens=number))
        reports.tell(f"client-{number}", [str(number)], cached_tokens=number)
    assert reports.find("client-1") is None
    assert reports.find("client-2") is not None
    for number in range(REMEMBERED + 1):  # of requests whose end nobody told either
        reports.note(f"lost-{number}", HIT)
    assert reports.tell("late", ["lost-0"], cached_tokens=0) is None
