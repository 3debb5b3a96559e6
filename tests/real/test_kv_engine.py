"""Our connector and our tier inside a real vLLM in one process: equality in two number formats, contracts, and the
engine's own offloading manager."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvrelay.edge.system.ports import spare_port
from tests.real.beside_vllm import python_path
from tests.real.engine import Engine, EngineUnavailable, installed

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

SCRIPTS = Path(__file__).with_name("in_engine")
COUNT = 50


def engine() -> Engine:
    try:
        return installed()
    except EngineUnavailable as reason:
        pytest.fail(f"the real engine cannot run here: {reason}", pytrace=False)


def run(used: Engine, script: str, *arguments: object) -> Any:
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [str(used.python), str(SCRIPTS / f"{script}.py"), *map(str, arguments)]
    environment = inherited | {"PYTHONPATH": python_path(used)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, f"{script} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return json.loads(results[-1].removeprefix("RESULT "))


@pytest.mark.covers("S33", "CN-05")
@pytest.mark.parametrize(("dtype", "kernels"), [("bfloat16", {"amx", "vec"}), ("float32", {"vec"})])
def test_loaded_kv_equals_a_local_hit_to_the_bit(tmp_path: Path, dtype: str, kernels: set[str]) -> None:
    used = engine()
    store = tmp_path / "store"
    run(used, "equality", "write", used.model, store, spare_port(), dtype, COUNT)
    read = run(used, "equality", "read", used.model, store, spare_port(), dtype, COUNT)
    assert read.pop("kernel") in kernels
    assert read.pop("different_answers") > COUNT // 2
    tokens = read["loaded_tokens"]
    assert read == {
        "hits": COUNT,
        "loaded_tokens": tokens,
        "local_first": 0,
        "local_second": tokens,
        "equal": COUNT,
    }


@pytest.mark.covers("S33", "CC-01", "CC-02", "CC-03", "CC-05", "CC-06", "CC-08", "CC-11", "CC-13")
def test_an_engine_that_differs_in_one_thing_hits_nothing_and_is_told_which(tmp_path: Path) -> None:
    used = engine()
    results = run(used, "variants", used.model, tmp_path / "store", spare_port(), tmp_path)
    print("\n".join(f"{name}: {result}" for name, result in results.items()))
    itself = results.pop("itself")
    assert (itself["kv"]["outcome"], itself["kv"]["loaded_tokens"], itself["differs"]) == ("hit", 256, [])
    tried = {name: result for name, result in results.items() if "impossible" not in result}
    assert len(tried) >= 8, results
    for name, result in tried.items():
        assert (name, result["kv"]["outcome"], result["kv"]["cached_tokens"]) == (name, "none", 0)
        assert result["kv"]["reason"] == "absent"
        if name != "tenant":  # what other tenants have is nobody's business
            assert result["field"] in result["differs"], name


@pytest.mark.covers("TR-01", "CN-05", "CN-12")
def test_the_engines_own_offloading_uses_our_store_as_its_second_tier(tmp_path: Path) -> None:
    used = engine()
    results = run(used, "native_tier", used.model, tmp_path / "store")
    hits, misses = ["HIT"] * 6, ["MISS"] * 6
    assert results["files"] == 6
    assert results["another engine"] == results["from host memory then"] == results["again"] == [hits, 0]
    assert results["another contract"] == [misses, 0]
    words, wrong = results["one damaged"]
    assert wrong == 0 and words.count("MISS") >= 1 and words[:2] == ["HIT", "HIT"]
    assert "missing: `rope_config`" in results["without a field"]


@pytest.mark.covers("CN-05", "CN-07")
def test_the_workers_half_moves_only_what_was_verified() -> None:
    results = run(engine(), "halves")
    untouched = {"right": True, "others untouched": True, "failed untouched": True}
    assert results == {
        "same both ways": True,
        "saves": {"stored": 3},
        "all good": {"failed blocks": [], "outcome": "hit", "faults": 0} | untouched,
        "second corrupt": {"failed blocks": [11, 12, 13, 14], "outcome": "corrupt", "faults": 0} | untouched,
        "first missing": {"failed blocks": [9, 10, 11, 12, 13, 14], "outcome": "miss", "faults": 0} | untouched,
        "store raises": {"failed blocks": [9, 10, 11, 12, 13, 14], "outcome": "fault", "faults": 1} | untouched,
        "a part": True,
        "few slots": [{"staging_full": 3, "stored": 1}, 3],
    }
