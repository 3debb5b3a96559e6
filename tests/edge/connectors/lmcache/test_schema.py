"""The schema and the reader agree on what is legal; every field has a paragraph of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kvrelay.edge.connectors.lmcache.environment import looks_like_environment, read_environment
from kvrelay.edge.connectors.lmcache.reader import DEFAULTS, read, read_file
from kvrelay.edge.connectors.lmcache.schema import KNOBS, json_schema
from kvrelay.edge.connectors.lmcache.verdict import Host
from tests.json_schema import violations

HOST = Host(memory_gib=128, engine_gib=24, buffer_gib=12.8)
FROM_THE_TEXT = """
chunk_size: 256
local_cpu: true
max_local_cpu_size: 40
remote_url: "redis://cache-server:65432"
remote_serde: "naive"
"""


@pytest.mark.covers("OP-09")
def test_every_field_of_a_deployment_file_is_legal_explained_and_has_both_directions() -> None:
    given = yaml.safe_load(FROM_THE_TEXT)

    assert violations(json_schema(), given) == []
    assert given.keys() <= KNOBS.keys()
    assert all(knob.more and knob.less for knob in KNOBS.values())
    assert KNOBS.keys() == DEFAULTS.keys()  # whatever is taken over is explained
    assert violations(json_schema(), dict(DEFAULTS)) == []


@pytest.mark.covers("OP-09")
@pytest.mark.parametrize(
    "given",
    [
        {"chunk_sise": 256},
        {"chunk_size": 0},
        {"chunk_size": "256"},
        {"local_cpu": "yes"},
        {"max_local_cpu_size": -1},
        {"remote_serde": "pickle"},
        {"cache_policy": "MRU"},
        {"enable_blending": True},
        {"storage_plugins": ["mine"]},
        {"lookup_timeout_ms": 0},
    ],
)
def test_what_the_schema_refuses_the_reader_refuses_with_a_reason(given: dict[str, Any]) -> None:
    assert violations(json_schema(), given)
    (refused,) = read(given, HOST).refused
    assert refused.field in given and refused.reason


@pytest.mark.covers("OP-09")
def test_environment_variables_are_the_same_configuration(tmp_path: Path) -> None:
    file = tmp_path / "worker.env"
    file.write_text(
        "# LMCache\nexport LMCACHE_CHUNK_SIZE=256\nLMCACHE_LOCAL_CPU=True\nLMCACHE_MAX_LOCAL_CPU_SIZE=40\n"
        "LMCACHE_REMOTE_URL='redis://cache-server:65432'\nLMCACHE_REMOTE_SERDE=\"naive\"\n"
        "LMCACHE_CONFIG_FILE=/etc/none.yaml\nHF_HUB_OFFLINE=1\n"
    )
    assert read_file(file) == yaml.safe_load(FROM_THE_TEXT)


def test_only_assignments_are_taken_for_an_environment() -> None:
    assert not looks_like_environment("")
    assert not looks_like_environment("HF_HUB_OFFLINE=1\n")
    assert not looks_like_environment(FROM_THE_TEXT)
    assert read_environment("LMCACHE_CHUNK_SIZE=1\nLMCACHE_CHUNK_SIZE=2", int) == {"chunk_size": 2}
