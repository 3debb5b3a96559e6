"""A fleet of somebody else is not touched until everything that is asked for was said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.cli.test_drill import call

from kvrelay.lab.drills.fleets.staging_file import Unconfirmed, UnusableFleet, read_fleet

WORKER = '[[workers]]\nurl = "http://127.0.0.1:1"\npid = {pid}\nstart = "bash a.sh"\n'


def fleet_file(folder: Path, text: str) -> Path:
    file = folder / "fleet.toml"
    file.write_text(text)
    return file


@pytest.mark.covers("DR-00")
@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('model = "m"\n' + WORKER, "it does not say `staging = true`"),
        ('staging = false\nmodel = "m"\n' + WORKER, "it does not say `staging = true`"),
        ('staging = true\nmodel = "m"\n[[workers]]\nurl = "http://127.0.0.1:1"\n', "needs either `pid` or `uid`"),
        ('staging = true\nmodel = "m"\n' + WORKER.replace('start = "bash a.sh"\n', ""), "there would be no way back"),
        ('staging = true\nmodel = "m"\n' + WORKER.replace("{pid}", "999999999"), "no process 999999999 is running"),
        ('stagin = true\nmodel = "m"\n' + WORKER, "stagin"),
    ],
)
def test_a_fleet_that_is_not_staging_or_has_no_way_back_is_refused(text: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(UnusableFleet, match=complaint):
        read_fleet(fleet_file(tmp_path, text.replace("{pid}", str(os.getpid()))), ["w0=1"])


@pytest.mark.covers("DR-00")
def test_every_target_is_confirmed_by_hand(tmp_path: Path) -> None:
    pid = os.getpid()
    file = fleet_file(tmp_path, 'staging = true\nmodel = "m"\n' + WORKER.format(pid=pid) * 2)
    with pytest.raises(Unconfirmed) as refusal:
        read_fleet(file, [f"w0={pid}", "w1=1"])
    assert refusal.value.targets == [f"w1={pid}"]
    assert read_fleet(file, [f"w0={pid}", f"w1={pid}"]).workers[1].pid == pid


def test_the_command_says_what_it_would_strike_and_how_to_confirm_it(tmp_path: Path) -> None:
    pid = os.getpid()
    file = fleet_file(tmp_path, 'staging = true\nmodel = "m"\n' + WORKER.format(pid=pid))
    ended = call("run", "worker-loss", "--fleet", str(file))
    assert ended.returncode == 2 and f"hint: confirm each of them: --confirm w0={pid}" in ended.stderr
    assert call("run", "worker-loss", "--fleet", "simulatd").returncode == 2
