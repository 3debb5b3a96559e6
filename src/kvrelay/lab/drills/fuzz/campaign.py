"""Many seeds over several processes. What fails is shrunk and can be kept in a file that `--replay` plays again."""

from __future__ import annotations

import multiprocessing
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from kvrelay import __version__
from kvrelay.lab.drills.fuzz.play import Failure, play
from kvrelay.lab.drills.fuzz.schedule import Schedule, schedule_of
from kvrelay.lab.drills.fuzz.shrink import shrink

SEEDS_AT_A_TIME = 25


class Found(Struct, frozen=True, kw_only=True):
    """A failure as it is kept: the schedule alone is enough to play it again."""

    seed: int
    version: str
    commit: str | None
    failure: Failure
    shrunk: Schedule
    ops_before: int

    @property
    def ops(self) -> int:
        return len(self.shrunk.ops)


class Progress(Struct, frozen=True):
    """After each portion of seeds."""

    done: int
    found: tuple[Found, ...]


def fuzz(first_seed: int, seeds: int, *, jobs: int = 1, stop_at: int = 1) -> Iterator[Progress]:
    """Plays the seeds in portions; ends early when `stop_at` failures were found."""
    portions = [
        range(begin, min(begin + SEEDS_AT_A_TIME, first_seed + seeds))
        for begin in range(first_seed, first_seed + seeds, SEEDS_AT_A_TIME)
    ]
    done, found = 0, 0
    for portion, failures in _played(portions, jobs):
        done += len(portion)
        found += len(failures)
        yield Progress(done, failures)
        if found >= stop_at:
            return


def _played(portions: list[range], jobs: int) -> Iterator[tuple[range, tuple[Found, ...]]]:
    if jobs == 1:
        for portion in portions:
            yield portion, play_seeds(portion)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from zip(portions, pool.imap(play_seeds, portions), strict=True)


def play_seeds(seeds: range, *, play: Callable[[Schedule], Failure | None] = play) -> tuple[Found, ...]:
    """All of them; what fails is shrunk."""
    found = []
    for seed in seeds:
        schedule = schedule_of(seed)
        failure = play(schedule)
        if failure is not None:
            shrunk, failure = shrink(schedule, failure, play=play)
            found.append(
                Found(
                    seed=seed,
                    version=__version__,
                    commit=_commit(),
                    failure=failure,
                    shrunk=shrunk,
                    ops_before=len(schedule.ops),
                )
            )
    return tuple(found)


def _commit() -> str | None:
    """Of the source tree that this runs from, if it is one."""
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def keep(found: Found, path: Path) -> None:
    """Raises OSError."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")


def read_kept(path: Path) -> Schedule:
    """Of a kept failure, or a schedule by itself. Raises OSError or msgspec.DecodeError."""
    text = path.read_bytes()
    try:
        return msgspec.json.decode(text, type=Found).shrunk
    except msgspec.ValidationError:
        return msgspec.json.decode(text, type=Schedule)
