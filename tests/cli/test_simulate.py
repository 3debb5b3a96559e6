"""`kvrelay simulate` and `kvrelay size`: what they print, what they refuse, and what they never say."""

from __future__ import annotations

import http.server
import json
import re
import threading
from pathlib import Path

import msgspec
import pytest
from click.testing import Result
from typer.testing import CliRunner

from kvrelay.cli.main import app
from tests.edge.observe.samples import receipt
from tests.lab.sim.small_trace import write_small_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
    return write_small_trace(tmp_path_factory.mktemp("trace") / "small.jsonl")


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="kvrelay")
    assert result.exit_code == code, result.output
    return result


def speaks_of_speed(found: object) -> list[str]:
    """Members whose names say how fast something is. What a cell was told is not what it says."""
    if isinstance(found, dict):
        own = [name for name in found if re.search(r"latency|throughput|ttft|itl_|_ms|qps|e2e", name)]
        return own + [word for name, value in found.items() if name != "cell" for word in speaks_of_speed(value)]
    return [word for value in found for word in speaks_of_speed(value)] if isinstance(found, list) else []


@pytest.mark.covers("SM-02", "SM-03", "SM-05", "SM-06")
@pytest.mark.parametrize("mode", ["capacity", "routing", "events"])
def test_every_mode_answers_in_tokens_and_not_in_seconds(trace, mode):
    call = ("simulate", trace, "--mode", mode, "--workers", 2, "--blocks", 60, "--jobs", 1)
    found = json.loads(run(*call, "--json").stdout)
    assert found["cells"] and not speaks_of_speed(found)
    assert "speed is not" in found["limits"][0]
    said = run(*call)
    assert f"digest {found['digest']}" in said.stdout
    assert "Validation: error unknown" in said.stderr


@pytest.mark.covers("SM-02")
def test_what_expired_is_counted_apart_from_what_was_evicted(trace):
    call = ("simulate", trace, "--mode", "capacity", "--workers", 1, "--blocks", 100, "--jobs", 1, "--json")
    lru, ttl = json.loads(run(*call, "--cache", "lru,ttl", "--ttl-s", 10).stdout)["cells"]
    assert lru["expired_blocks"] == 0 < ttl["expired_blocks"]
    assert ttl["missed_tokens"]["expired"] > 0 and lru["hit_tokens"] > ttl["hit_tokens"]


@pytest.mark.covers("SM-07")
def test_the_error_against_measured_receipts_is_stated(trace, tmp_path):
    call = ("simulate", trace, "--mode", "capacity", "--workers", 1, "--blocks", 100, "--jobs", 1)
    (cell,) = json.loads(run(*call, "--cache", "vllm", "--json").stdout)["cells"]
    measured = tmp_path / "receipts.jsonl"
    one = receipt(actual_cached_tokens=cell["hit_tokens"] - 100)
    measured.write_bytes(msgspec.json.encode(one) + b"\n")
    said = run(*call, "--cache", "vllm", "--measured", measured).stderr
    error = 100 * 100 / (cell["hit_tokens"] - 100)
    assert f"over 1 requests: error {error:+.2f} %" in said
    assert "exactly one cell" in run(*call, "--measured", measured, code=2).stderr


def test_a_page_with_plots_needs_nothing_else(trace, tmp_path):
    page = tmp_path / "page.html"
    run("simulate", trace, "--mode", "capacity", "--blocks", "60,120", "--jobs", 1, "--html", page)
    html = page.read_text()
    assert "<svg" in html and "http" not in re.sub(r'http-equiv="[^"]*"', "", html)
    assert "Simulated: no GPU, no engine, no clock" in html


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "cash_load"), "hint: did you mean `cache_load`?"),
        (("--mode", "capacity", "--cache", "lri"), "hint: did you mean `lru`?"),
        (("--blocks", "ten"), "error: `--blocks` is `ten`"),
        (("--restart", "9@1"), "WORKER@SECONDS with a worker from 0 to 3"),
        (("--mode", "capacity", "--event-loss", "0.1"), "hint: `--mode events`"),
        (("--lower", "10"), "hint: `--mode capacity`"),
    ],
)
def test_what_cannot_be_simulated_says_what_can(trace, arguments, message):
    assert message in run("simulate", trace, *arguments, code=2).stderr


# --- size --------------------------------------------------------------------------------------------------------


@pytest.mark.covers("TU-01", "TU-02", "TU-04", "TU-05", "TU-06")
def test_sizing_a_trace_tells_curve_knee_tiers_chunks_and_break_even(trace, tmp_path):
    page = tmp_path / "size.html"
    call = ("size", trace, "--kv-bytes-per-token", 1000, "--tier", "gpu=0.02", "--tier", "cpu=0.05")
    money = ("--price-per-gb-month", 2, "--price-per-million-prefill-tokens", 0.1)
    found = json.loads(run(*call, *money, "--html", page, "--json").stdout)
    assert found["knee"]["capacity_blocks"] > 0 and "farthest above the straight line" in found["knee_rule"]
    hits = [step["hit_tokens"] for step in found["steps"]]
    assert hits == sorted(hits) and found["steps"][-1]["gain_tokens_per_gb"] is not None
    assert [row["chunk_tokens"] for row in found["chunks"]] == [16, 32, 64, 128, 256, 512]
    assert {"hit_tokens", "metadata_bytes", "transfer_efficiency"} <= set(found["chunks"][0])
    assert [row["tier"] for row in found["tiers"]] == ["gpu", "cpu"]
    assert found["splits"][0]["far_read_share"] > found["splits"][-1]["far_read_share"] == 0
    assert found["splits"][0]["host_memory_bytes"] > 0
    assert sum(row["tokens"] for row in found["reuse_distances"]) == hits[-1]
    assert found["costs"] and found["breakeven"][0]["points"]
    assert page.read_text().count("<svg") == 2


@pytest.mark.covers("TR-17")
def test_a_sweep_of_small_middle_and_large_recommends_one_with_the_reason(trace):
    call = ("size", trace, "--kv-bytes-per-token", 1000, "--link", "x=12,0.05", "--prefill-tokens-per-s", 8000)
    found = json.loads(run(*call, "--sweep", "auto", "--json").stdout)["sweep"]
    sizes = [row["capacity_bytes"] for row in found["rows"]]
    assert len(sizes) == len(found["why"]) == 3 and sizes == sorted(sizes)
    assert found["recommended_bytes"] in sizes
    slow = json.loads(run(*call[:4], "--link", "x=0.001,0.05", *call[6:], "--sweep", "0.01,0.1,1", "--json").stdout)
    assert slow["sweep"]["recommended_bytes"] == 0  # fetching loses to computing, however large
    assert "Recommended: " in run(*call, "--sweep", "auto").stdout
    assert (
        "compares sizes on a trace"
        in run("size", "--host-gb", 9, "--engine-gb", 1, "--cache-gb", 1, "--sweep", "1", code=2).stderr
    )


@pytest.mark.covers("TU-08")
def test_a_cache_that_the_host_has_no_room_for_is_refused():
    result = run("size", "--host-gb", 128, "--engine-gb", 8, "--cache-gb", 120, code=1)
    assert "120 GB of cache does not fit" in result.stdout and "most what is left" in result.stderr
    run("size", "--host-gb", 128, "--engine-gb", 8, "--cache-gb", 100)


@pytest.mark.covers("TU-06", "TU-07")
def test_break_even_of_a_running_fleet_uses_its_learned_rates_and_a_measured_store(tmp_path):
    workers = {
        "workers": [
            {"name": "a", "targets": [{"prefill_tokens_per_s": 1500.0, "prefill_rate_samples": 9}]},
            {"name": "b", "targets": [{"prefill_tokens_per_s": 8000.0, "prefill_rate_samples": 0}]},
        ]
    }
    with admin_port(workers) as url:
        call = ("size", "--live", url, "--store", f"file://{tmp_path}/store", "--kv-bytes-per-token", 2000)
        found = json.loads(run(*call, "--json").stdout)["breakeven"]
    assert [row["prefill"] for row in found] == [{"name": "a: 1,500 tokens/s", "tokens_per_s": 1500.0, "samples": 9}]
    assert found[0]["link"]["bytes_per_s"] > 0
    with admin_port({"workers": []}) as url:
        assert "has learned no prefill rate yet" in run("size", "--live", url, code=3).stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "error: nothing to size"),
        (("--demo", "--layers", 3), "`--layers` without `--kv-heads`, `--head-dim`"),
        (("--demo", "--tier", "gpu"), "error: `--tier` is `gpu`"),
        (("--demo", "--link", "x=1"), "error: `--link` is `x=1`"),
        (("--cache-gb", 10), "needs `--host-gb` too"),
        (("--demo", "--price-per-gb-month", 1), "together"),
        (("--store", "file:relative"), "cannot measure the store"),
    ],
)
def test_what_cannot_be_sized_says_what_is_missing(arguments, message):
    assert message in run("size", *arguments, code=2).stderr


class admin_port:
    """Answers every path with one JSON object."""

    def __init__(self, answer: object) -> None:
        body = json.dumps(answer).encode()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> str:
        self._thread.start()
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
