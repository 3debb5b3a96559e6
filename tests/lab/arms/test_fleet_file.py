from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.core.gates.evidence import Hardware
from kvrelay.lab.arms.fleet_file import FleetFileError, Note, read_fleet
from kvrelay.lab.arms.model_facts import StatedModel, local_model

WHOLE = """
[[workers]]
name = "a"
url = "HTTP://127.0.0.1:8100/v1"
api_key_file = "key"

[[workers]]
name = "b"
url = "http://127.0.0.1:8101"

[model]
path = "/models/one"

[notes.b]
log = "elsewhere:/var/log/b.log"
"""


def test_a_fleet_with_everything(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    (tmp_path / "fleet.toml").write_text(WHOLE)
    fleet = read_fleet(tmp_path / "fleet.toml")

    assert [worker.url for worker in fleet.workers] == ["http://127.0.0.1:8100", "http://127.0.0.1:8101"]
    assert fleet.headers(fleet.workers[0]) == {"Authorization": "Bearer secret"}
    assert fleet.lines(fleet.workers[1]) == ('url = "http://127.0.0.1:8101"', 'name = "b"')
    assert fleet.model == StatedModel("/models/one")
    assert not fleet.has_router
    (tmp_path / "fleet.toml").write_text(f'{WHOLE}[router]\nurl = "http://127.0.0.1:8000"\n')
    assert read_fleet(tmp_path / "fleet.toml").has_router
    assert fleet.notes == {"b": Note("elsewhere:/var/log/b.log")}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "no worker"),
        ("[worker]", "unknown table `worker`"),
        ('[[workers]]\nname = "a"', "`workers.0.url`: Field required"),
        ('[[workers]]\nname = "a"\nurl = "http://a:1"\n' * 2, "two workers called `a`"),
        ('[[workers]]\nname = "a"\nurl = "http://a:1"\n[notes.b]\nlog = "x"', "a note on `b`"),
    ],
)
def test_what_is_no_fleet_is_said(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(text)

    with pytest.raises(FleetFileError) as error:
        read_fleet(path)
    assert error.value.found == found


@pytest.mark.covers("BM-02")
def test_a_model_is_known_by_its_commit_or_by_its_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "tokenizer.json").write_bytes(b"{}")
    (folder / "chat_template.jinja").write_bytes(b"x")
    (folder / "config.json").write_bytes(b"{}")
    first = local_model("m", StatedModel(str(folder)))
    assert first.revision is not None and first.revision.startswith("content:")
    assert first.tokenizer_sha256 and first.chat_template_sha256

    (folder / "model.safetensors").write_bytes(b"other")
    assert local_model("m", StatedModel(str(folder))).revision != first.revision
    snapshot = tmp_path / "snapshots" / ("0a" * 20)
    snapshot.mkdir(parents=True)
    assert local_model("m", StatedModel(str(snapshot))).revision == "0a" * 20
    assert local_model("m", StatedModel(revision="main")).revision is None
    assert local_model("m", StatedModel(revision="1b" * 20)).revision == "1b" * 20


def test_hardware_is_never_taken_from_a_file() -> None:
    assert "hardware" not in Note.__struct_fields__ and "gpu" in {one.value for one in Hardware}
