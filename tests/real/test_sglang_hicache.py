"""Our HiCache flags, legal values and memory reserve against the sources of SGLang that they were taken from."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from kvrelay.edge.connectors.sglang.hicache import (
    IO_BACKENDS,
    RESERVE_BYTES,
    STORAGE_BACKENDS,
    WRITE_POLICIES,
    HiCache,
    flags,
)
from kvrelay.edge.connectors.tiering import HICACHE, LMCACHE, implementations
from tests.real.engine import EngineUnavailable
from tests.real.test_sglang import packages

pytestmark = [pytest.mark.real, pytest.mark.covers("TR-09", "TR-10")]


@pytest.fixture(scope="module")
def srt() -> Path:
    try:
        return packages()[1] / "sglang" / "srt"
    except (EngineUnavailable, OSError) as problem:
        pytest.skip(f"SGLang cannot be installed here: {problem}")


def fields(folder: Path) -> dict[str, list[str]]:
    """Every server argument with its choices, where it has any: annotated members of the argument groups."""
    found: dict[str, list[str]] = {}
    for file in sorted((folder / "arg_groups" / "fields").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                words = [one for one in ast.walk(node.annotation) if isinstance(one, ast.keyword)]
                choices = [item for one in words if one.arg == "choices" for item in ast.walk(one.value)]
                found[node.target.id] = [str(item.value) for item in choices if isinstance(item, ast.Constant)]
    return found


def test_every_flag_is_an_argument_and_every_value_legal(srt: Path) -> None:
    known = fields(srt)
    for cache in (HiCache(), HiCache(storage="mooncake")):
        for flag in (word for word in flags(cache) if word.startswith("--")):
            assert flag.removeprefix("--").replace("-", "_") in known, flag
    assert sorted(IO_BACKENDS) == sorted(known["hicache_io_backend"])
    assert sorted(WRITE_POLICIES) == sorted(known["hicache_write_policy"])
    assert set(STORAGE_BACKENDS) <= set(known["hicache_storage_backend"])


def test_what_turns_a_tier_on_is_named_as_there(srt: Path) -> None:
    known = fields(srt)
    for name, expected in (("enable_hierarchical_cache", HICACHE), ("enable_lmcache", LMCACHE)):
        assert name in known
        assert implementations(("--" + name.replace("_", "-"),)) == (expected,)


def test_the_reserve_and_the_refusal_are_theirs(srt: Path) -> None:
    text = (srt / "mem_cache" / "pool_host" / "base.py").read_text(encoding="utf-8")
    tree = ast.parse(text)
    (stated,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "HICACHE_HOST_MEMORY_RESERVE_BYTES"
    ]
    assert stated is not None and ast.unparse(stated) == "10 * 1024 ** 3"
    assert RESERVE_BYTES == 10 * 1024**3
    assert "Not enough host memory available" in text
