"""Every scenario of the router twice over HTTP: in calm, where it must keep its own promise, and among faults.

Among faults (five requests in a hundred fail in some way, see `stage.py`) the books must close: exactly one receipt and
one terminal status for every request, and what the client saw is what the receipt says; no gauge and no task is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from _pytest.mark import ParameterSet

from kvrelay.edge.worker.launch import MockFleet
from tests.scenarios import failures, load, prompts, wire
from tests.scenarios.judge import assert_books_close
from tests.scenarios.stage import SPECS, WORKERS, Stage, stage_of

Play = Callable[[Stage], Awaitable[None]]


class Scenario(msgspec.Struct, frozen=True):
    """What is played, on how many workers, under which configuration."""

    play: Play
    workers: int
    settings: dict[str, object]
    entry: dict[str, object]  # more members of every `[[workers]]` table
    fleet: str  # fixture

    @property
    def name(self) -> str:
        return self.play.__name__.partition("_")[0].upper()


def scenario(
    play: Play,
    *,
    workers: int = WORKERS,
    entry: dict[str, object] | None = None,
    fleet: str = "fleet",
    whole: bool = True,
    **settings: object,
) -> ParameterSet:
    """`settings` are configuration keys with `__` for dots. Not `whole`: a part of the promise is shown elsewhere."""
    dotted = {key.replace("__", "."): value for key, value in settings.items()}
    played = Scenario(play, workers, dotted, entry or {}, fleet)
    return pytest.param(played, id=played.name, marks=[pytest.mark.covers(played.name)] if whole else [])


SCENARIOS = [
    scenario(load.s01_clients_leave_at_every_stage),
    scenario(load.s02_a_client_does_not_wait_for_a_slow_answer, workers=2),
    scenario(load.s03_a_burst_is_spread_although_reports_are_old, workers=2, health__interval_s=5.0),
    scenario(load.s04_warm_sessions_return_while_another_worker_is_saturated),
    scenario(load.s05_a_full_cache_is_no_reason_for_a_prompt_without_overlap, workers=2),
    scenario(load.s06_one_shared_system_prompt_makes_no_hot_worker),
    scenario(prompts.s19_text_parts_are_scored_and_images_are_not, workers=2),
    scenario(prompts.s20_other_endpoints_are_proxied_and_said_to_be_unscored, workers=2),
    scenario(prompts.s21_tools_and_options_are_part_of_the_prompt, workers=2),
    scenario(prompts.s22_every_shape_of_a_completions_prompt, workers=2),
    scenario(prompts.s23_a_fleet_whose_events_go_elsewhere, workers=1, entry={"topic": "kv@nobody"}, whole=False),
    scenario(failures.s24_a_prompt_that_is_too_long_is_the_clients_fault),
    scenario(failures.s25_full_workers, workers=2),
    scenario(failures.s26_the_preferred_worker_fails_every_request, workers=2),
    scenario(failures.s27_a_worker_dies_before_its_first_byte_and_in_mid_stream, workers=2, gateway__policy="sticky"),
    scenario(failures.s28_errors_of_streaming_requests_are_the_workers_own, workers=2),
    scenario(wire.s29_encodings_and_lengths, workers=1),
    scenario(wire.s30_usage_options_of_streams, workers=1),
    scenario(wire.s31_keys, workers=2, fleet="keyed_fleet"),
    scenario(failures.s32_eight_first_turns_of_one_session, workers=2, gateway__policy="sticky"),
]


@pytest.fixture(scope="module")
def fleet() -> Iterator[MockFleet]:
    with MockFleet(SPECS) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def keyed_fleet() -> Iterator[MockFleet]:
    with MockFleet([msgspec.structs.replace(spec, api_key=wire.RIGHT) for spec in SPECS[:2]]) as fleet:
        yield fleet


@pytest.mark.parametrize("faulty", [False, True], ids=["calm", "faulty"])
@pytest.mark.parametrize("played", SCENARIOS)
async def test_scenario(
    played: Scenario, faulty: bool, request: pytest.FixtureRequest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvrelay")
    fleet, entry = request.getfixturevalue(played.fleet), played.entry
    if played.fleet == "keyed_fleet":
        (tmp_path / "key").write_text(wire.RIGHT)
        entry = {**entry, "api_key_file": str(tmp_path / "key")}
    async with stage_of(fleet, played.settings, workers=played.workers, faulty=faulty, entry=entry) as stage:
        tasks_at_rest = len(asyncio.all_tasks())
        if faulty:
            await asyncio.gather(played.play(stage), stage.others())
            await stage.until_struck()
        else:
            await played.play(stage)
        await assert_books_close(stage, tasks_at_rest=tasks_at_rest, log=caplog.text)
    assert wire.RIGHT not in caplog.text and wire.WRONG not in caplog.text
