"""`kvrelay trace`, whole messages included."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvrelay.cli.main import app
from kvrelay.core.traces.cut import CutRule, cut
from kvrelay.core.traces.formats.options import ImportOptions
from kvrelay.core.traces.presets import preset
from kvrelay.core.traces.reuse import reuse_of
from kvrelay.lab.replay.trace_file import read_trace


def kvrelay_trace(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["trace", *map(str, arguments)])


def rows(path: Path, *members: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in members))
    return path


def two_rows(folder: Path) -> Path:
    """The second request repeats the first and goes on: two of three blocks are hits."""
    return rows(
        folder / "rows.jsonl",
        {"timestamp": 5000, "input_length": 1000, "output_length": 7, "hash_ids": [0, 1]},
        {"timestamp": 7000, "input_length": 1100, "output_length": 9, "hash_ids": [0, 1, 2]},
    )


def test_inspect_says_what_is_in_a_trace_and_how_it_counted(tmp_path: Path) -> None:
    result = kvrelay_trace("inspect", two_rows(tmp_path))

    assert result.exit_code == 0
    assert result.stdout == (
        "rows.jsonl (mooncake)\n"
        "  2 requests, 2 sessions (2 derived from shared blocks)\n"
        "  2.0 s from the first request to the last, 0.5 requests/s\n"
        "  blocks: 512 tokens, ids global, 2 requests list a partial last block\n"
        "\n"
        "                      count        p50        p95        p99         mean    largest\n"
        "  input tokens            2      1,000      1,100      1,100      1,050.0      1,100\n"
        "  output tokens           2          7          9          9          8.0          9\n"
        "  turns                   2          1          1          1          1.0          1\n"
        "\n"
        "  endless cache, tail rule `listed` (all ids of a row count, the partial last block too)\n"
        "    48.76% = 1,024 hit tokens / 2,100 input tokens\n"
        "    40.00% = 2 hit blocks / 5 blocks\n"
        "    blocks sent before by the same session 0.0%, a parent or sub-agent 0.0%, "
        "other sessions 40.0%; never 60.0%\n"
        "\n"
        "  endless cache, tail rule `full` (full blocks only, as engines cache them)\n"
        "    24.38% = 512 hit tokens / 2,100 input tokens\n"
        "    33.33% = 1 hit blocks / 3 blocks\n"
        "    blocks sent before by the same session 0.0%, a parent or sub-agent 0.0%, "
        "other sessions 33.3%; never 66.7%\n"
    )
    assert result.stderr == (
        "note: Block size 512 tokens: the only power of two of 334 to 549 that agrees with all 2 rows.\n"
        "note: Times begin at 5000 ms on the file's clock: they are counted from the first request.\n"
    )


def test_inspect_as_json_and_as_a_page_that_needs_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "page.html"

    result = kvrelay_trace("inspect", "preset:agents", "--json", "--html", page)

    facts = json.loads(result.stdout)
    assert (facts["format"], facts["sessions"], facts["sub_agents"], facts["requests"]) == ("preset", 12, 4, 84)
    (cache,) = facts["endless_cache"]
    assert cache["token_hit"] == reuse_of(preset("agents").trace).token_hit
    assert cache["denominators"]["token_hit"] == "hit tokens / all input tokens, first requests included"
    assert sum(cache["block_shares"].values()) == pytest.approx(1.0)
    html = page.read_text()
    assert html.count("<figure>") == 6 and "<script" not in html and "http" not in html.replace("http-equiv", "")


def test_a_trace_without_blocks_has_no_hit_rate(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n")

    shown = kvrelay_trace("inspect", path, "--html", tmp_path / "page.html")

    assert "endless cache: unavailable, the trace has no block ids" in shown.stdout
    assert json.loads(kvrelay_trace("inspect", path, "--json").stdout)["endless_cache"] == []


def test_what_a_file_does_not_say_is_asked_for(tmp_path: Path) -> None:
    path = rows(tmp_path / "r.jsonl", {"timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": [1]})

    result = kvrelay_trace("inspect", path)

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"error: `{path}`, line 1: lengths that agree with several block sizes "
        "(32, 64, 128, 256, 512, 1024, ... 4096)\n"
        "  needed: the block size told; it is not guessed, because reuse depends on it\n"
        "hint: for instance `--block-size 16`\n"
    )
    assert kvrelay_trace("inspect", path, "--block-size", 64).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("inspect", "absent.jsonl"), "error: cannot read trace `absent.jsonl`: No such file or directory\n"),
        (("inspect", "preset:agent"), "error: `preset:agent`, line 1: unknown preset `agent`\n  legal: one of preset:"),
        (("convert", "preset:rag", "--to", "wekka"), "error: unknown format `wekka` (from `--to`)\n"),
        (("inspect", "preset:rag", "--format", "mooncacke"), "hint: did you mean `mooncake`?\n"),
        (("filter", "preset:rag", "--json"), "error: `--out` is `-` (from the command line)\n"),
        (("convert", "preset:rag", "--out", "/absent/x"), "error: cannot write `/absent/x` (from `--out`): No such"),
    ],
)
def test_usage_errors_name_what_is_legal(arguments: tuple[str, ...], message: str) -> None:
    result = kvrelay_trace(*arguments)

    assert result.exit_code == 2
    assert message in result.stderr


def test_convert_writes_what_can_be_read_back_and_names_what_is_lost(tmp_path: Path) -> None:
    out = tmp_path / "agents.jsonl.gz"

    result = kvrelay_trace("convert", "preset:agents", "--to", "mooncake", "--out", out)

    assert result.stderr == (
        "note: Made by a preset, not recorded.\n"
        "note: Think times are lost: these rows say when a request was made, not how long after an answer.\n"
        "note: Which session started which sub-agent is lost; both keep their names.\n"
        f"{out}: 84 requests of 16 sessions as `mooncake`\n"
    )
    original, again = preset("agents").trace, read_trace(out).trace
    assert reuse_of(again).hit_tokens == reuse_of(original).hit_tokens
    assert (len(again.sessions), again.requests, again.input_tokens) == (16, 84, original.input_tokens)
    kvrelay_trace("convert", "preset:agents", "--to", "mooncake", "--out", tmp_path / "again.jsonl.gz")
    assert (tmp_path / "again.jsonl.gz").read_bytes() == out.read_bytes()


def test_sessions_are_derived_from_blocks_on_demand(tmp_path: Path) -> None:
    out = tmp_path / "sessions.jsonl"
    path = rows(
        tmp_path / "r.jsonl",
        {"timestamp": 0, "input_length": 64, "output_length": 1, "hash_ids": [0, 1]},
        {"timestamp": 5, "input_length": 64, "output_length": 1, "hash_ids": [0, 9]},
        {"timestamp": 9, "input_length": 96, "output_length": 1, "hash_ids": [0, 1, 2]},
    )

    result = kvrelay_trace("convert", path, "--block-size", 32, "--derive-sessions", "--to", "mooncake", "--out", out)

    assert result.exit_code == 0
    turns = [(s.session_id, [t.due_ms for t in s.turns]) for s in read_trace(out, ImportOptions(32)).trace.sessions]
    assert turns == [("derived-0", [0.0, 9.0]), ("derived-1", [0.0])]


def test_what_a_format_cannot_say_is_refused(tmp_path: Path) -> None:
    cut_context = rows(
        tmp_path / "r.jsonl",
        {"session_id": "s", "timestamp": 0, "input_length": 64, "output_length": 1, "hash_ids": [1, 2]},
        {"session_id": "s", "timestamp": 9, "input_length": 40, "output_length": 1, "hash_ids": [1, 7]},
    )

    result = kvrelay_trace("convert", cut_context, "--to", "aiperf", "--block-size", 32)

    assert (result.exit_code, result.stdout) == (2, "")
    assert "error: this trace cannot be written as `aiperf`: turn 2 of session `s` does not continue" in result.stderr


@pytest.mark.covers("BM-14", "BM-15", "BM-16", "S45")
def test_filter_counts_by_reason_and_shows_reuse_before_and_after(tmp_path: Path) -> None:
    out = tmp_path / "cut.jsonl"
    wanted = ("filter", "preset:agents", "--max-model-len", 4000, "--sample", 0.5, "--seed", 7)

    result = kvrelay_trace(*wanted, "--max-requests", 20, "--out", out, "--json")

    said = json.loads(result.stdout)
    counts = said["counts"]
    trace = preset("agents").trace
    assert counts["received"] == 84
    assert counts["retained"] + sum(v for k, v in counts.items() if k not in ("received", "retained")) == 84
    assert min(counts["over_long"], counts["after_over_long"], counts["session_not_sampled"]) > 0
    assert said["label"] == "multi_turn_agents, filtered synthetic subset"
    kept = read_trace(out).trace
    assert kept.label == said["label"] and kept.requests == counts["retained"] <= 20
    same = cut(trace, CutRule(max_context_tokens=4000, sample_share=0.5, sample_seed=7, max_requests=20)).trace
    assert kept == same
    hits = said["endless_cache_token_hit"]
    assert (hits["before"], hits["after"]) == (reuse_of(trace).token_hit, reuse_of(kept).token_hit)
    in_words = kvrelay_trace(*wanted, "--out", out).stderr
    assert "too long for the model\n" in in_words and "endless cache: 85.00% of input tokens before" in in_words
    assert in_words.endswith("results on it are to be called: multi_turn_agents, filtered synthetic subset\n")


@pytest.mark.covers("BM-13")
@pytest.mark.parametrize("form", ["tokens", "text", "chat"])
def test_prompts_are_the_same_bytes_for_a_seed_and_equal_exactly_where_ids_are(tmp_path: Path, form: str) -> None:
    outs = [tmp_path / name for name in ("a", "b", "c")]

    for out, seed in zip(outs, (7, 7, 8), strict=True):
        assert kvrelay_trace("synth", "preset:rag", "--as", form, "--seed", seed, "--out", out).exit_code == 0

    assert outs[0].read_bytes() == outs[1].read_bytes() != outs[2].read_bytes()
    turns = [session.turns[0] for session in preset("rag").trace.sessions]
    prompts = [blocks_of(json.loads(line)) for line in outs[0].read_bytes().splitlines()]
    of_id = {
        i: block
        for turn, prompt in zip(turns, prompts, strict=True)
        for i, block in zip(turn.block_ids, prompt, strict=True)
    }
    assert len(set(of_id.values())) == len(of_id)
    for turn, prompt in zip(turns, prompts, strict=True):
        assert prompt == [of_id[i] for i in turn.block_ids]


def blocks_of(row: dict[str, object]) -> list[tuple[object, ...]]:
    messages = row.get("messages")
    prompt = messages[0]["content"] if isinstance(messages, list) else row["prompt"]
    units = prompt if isinstance(prompt, list) else str(prompt).split(" ")[:-1]
    return [tuple(units[start : start + 16]) for start in range(0, len(units), 16)]


def test_a_reader_that_has_had_enough_is_no_error() -> None:
    command = [sys.executable, "-m", "kvrelay.cli.main", "trace", "synth", "preset:agents"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(100)
        process.stdout.close()
        assert (process.wait(30), process.stderr.read()) == (0, b"note: Made by a preset, not recorded.\n")


def test_request_logs_are_hashed_with_a_key_that_is_new_each_time_or_told(tmp_path: Path) -> None:
    log = rows(
        tmp_path / "log.jsonl", {"timestamp": 1, "prompt": "a secret prompt", "max_tokens": 3, "session_id": "me"}
    )
    (tmp_path / "key").write_bytes(b"k" * 100)

    def name(*more: object) -> str:
        out = tmp_path / "out.jsonl"
        assert kvrelay_trace("convert", log, "--block-size", 2, "--out", out, *more).exit_code == 0
        assert b"secret" not in out.read_bytes()
        return read_trace(out).trace.sessions[0].session_id

    assert name() != name()
    assert name("--key-file", tmp_path / "key") == name("--key-file", tmp_path / "key")


def test_packed_files_are_packed(tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl.gz"
    kvrelay_trace("convert", "preset:rag", "--out", out)

    assert gzip.decompress(out.read_bytes()).startswith(b'{"kvrelay_trace":1')
