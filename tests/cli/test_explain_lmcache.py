"""`kvrelay config explain-lmcache`: a page that is also a configuration, and a refusal that names its reasons."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvrelay.cli.config import app

HOST = ("--host-memory", "128", "--engine-memory", "8")


def run(file: Path, *more: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["explain-lmcache", str(file), *HOST, *more])
    return result.exit_code, result.stdout, result.stderr


def test_the_page_explains_every_field_and_is_the_section_that_it_became(tmp_path: Path) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text("chunk_size: 64\nmax_local_cpu_size: 2\nremote_url: redis://cache:6379\n")
    code, page, _ = run(file)
    assert code == 0
    assert "# chunk_size = 64: taken -> chunk_tokens = 64" in page
    assert [tier["url"] for tier in tomllib.loads(page)["store"]["tiers"]] == [
        "memory://kvrelay",
        "valkey://cache:6379/0",
    ]
    converted = json.loads(run(file, "--json")[1])["converted"]
    assert converted["store"] == tomllib.loads(page)["store"]
    assert converted["kv_connector_extra_config"] == {"chunk_tokens": 64, "save_generated": False}


@pytest.mark.covers("TU-08")
def test_a_dangerous_value_is_refused_and_nothing_is_converted(tmp_path: Path) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text("max_local_cpu_size: 120\n")
    code, page, errors = run(file)
    assert code == 2
    assert "[store]" not in page
    assert errors == (
        f"error: 1 of the fields cannot be taken over (from {file})\n"
        "  `max_local_cpu_size` is `120`: 120 GiB of cache do not fit: this host has 128 GiB, of which the engine "
        "takes 8 and 12.8 stay free as a buffer; at most 107.2 GiB\n"
        "hint: change or remove them; nothing was converted\n"
    )
    assert json.loads(run(file, "--json")[1])["converted"] is None


@pytest.mark.covers("OP-09")
def test_a_review_reads_one_paragraph_per_field_with_both_directions(tmp_path: Path) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text("max_local_cpu_size: 40\n")
    _, page, _ = run(file)
    paragraph = page[page.index("# max_local_cpu_size") :].splitlines()
    assert paragraph[0] == "# max_local_cpu_size = 40: taken -> bytes = 42949672960"
    assert paragraph[1] == "#   107.2 GiB would fit"
    assert [line.split(":")[0] for line in paragraph[2:5]] == ["#   unit", "#   more", "#   less"]
    schema = json.loads(CliRunner().invoke(app, ["lmcache-schema"]).stdout)
    assert "max_local_cpu_size" in schema["properties"] and schema["additionalProperties"] is False


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "none.yaml"
    assert run(file) == (
        2,
        "",
        f"error: cannot read `{file}` (from the command line): No such file or directory\n",
    )
