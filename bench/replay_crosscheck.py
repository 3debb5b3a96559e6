"""Do our replay and an independent tool measure the same? `python -m bench.replay_crosscheck`

Both send the same request bodies at the same moments to the same mock worker, a fresh one for every run. The mock's
costs (time to first token of some hundred ms, tens of ms per token) are so large that what clients add themselves, a
few ms, is below the limit of 5 %; a difference in *definition* (from when to when, per chunk or per token) is not.

The tool is AIPerf, which is no dependency: it gets a virtual environment of its own in the user's cache (or
`$AIPERF_CACHE`), as it pins many packages. Runs alternate (ours, theirs, theirs, ours), so that what else the machine
does falls on both.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
from msgspec import Struct
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from kvrelay.core.traces.draw import Draw
from kvrelay.core.traces.plan import Plan, Scale, make_plan
from kvrelay.core.traces.trace import GLOBAL_SCOPE, Session, Trace, Turn
from kvrelay.edge.worker.launch import MockFleet
from kvrelay.edge.worker.spec import MockSpec
from kvrelay.lab.replay.client import CompletionClient, completion_body
from kvrelay.lab.replay.replay import Arm, replay
from kvrelay.lab.replay.sample import Sample
from kvrelay.lab.replay.sending import sending

VERSION = "0.13.0"
LIMIT = 0.05
SEED, REQUESTS, BLOCK_TOKENS, OUTPUT_TOKENS = 42, 40, 16, 24
GAP_MS = (500, 1100)  # requests overlap now and then, and the worker keeps up
INPUT_BLOCKS = (60, 140)
MODEL = "mock-model"
ORDER = ("kvrelay", "aiperf", "aiperf", "kvrelay")
PERCENTILES = (50, 95)


class Request(Struct, frozen=True):
    """What one tool says about one request, from when it was sent."""

    ttft_ms: float
    itl_ms: float  # mean gap between tokens


class ToolMissing(Exception):
    """AIPerf could not be installed; the message says why."""


def worker() -> MockSpec:
    """About 250 to 560 ms to the first token, 25 ms per further one."""
    return MockSpec(name="mock", model=MODEL, prefill_tokens_per_s=4000.0, decode_ms=25.0, blocks=20_000)


def same_requests() -> Plan:
    """No two prompts share a block: a hit would make the second run of anything faster."""
    gaps, sizes = Draw(SEED, "gaps"), Draw(SEED, "sizes")
    sessions, at_ms, used = [], 0.0, 0
    for number in range(REQUESTS):
        blocks = sizes.between(number, *INPUT_BLOCKS)
        turn = Turn(0.0, 0.0, tuple(range(used, used + blocks)), blocks * BLOCK_TOKENS, OUTPUT_TOKENS)
        sessions.append(Session(f"request-{number:02}", "", (turn,), at_ms))
        used, at_ms = used + blocks, at_ms + gaps.between(number, *GAP_MS)
    return make_plan(Trace(BLOCK_TOKENS, GLOBAL_SCOPE, tuple(sessions)), Scale(BLOCK_TOKENS), seed=SEED)


async def measured_by_us(plan: Plan) -> list[Request]:
    samples: list[Sample] = []
    async with MockFleet([worker()]) as fleet, CompletionClient(fleet.workers[0].url, timeout_s=60.0) as client:
        await replay(plan, client, arm=Arm("none", 0), model=MODEL, on_sample=samples.append)
    failures = [sample.failure for sample in samples if not sample.ok]
    assert not failures, failures
    assert sending(samples, max_in_flight=None).open_loop
    return [Request(s.ttft_sent_ms or 0.0, fmean(s.itl_ms)) for s in samples]


async def measured_by_aiperf(plan: Plan, program: Path, folder: Path) -> list[Request]:
    """The tool sends the bodies as they are, on its own fixed schedule."""
    rows, artifacts = folder / "requests.jsonl", folder / "artifacts"
    with rows.open("w") as file:
        for session in plan.sessions:
            (turn,) = session.turns
            body = json.loads(completion_body(MODEL, turn.token_ids, turn.max_tokens))
            file.write(json.dumps({"timestamp": turn.due_ms, "payload": body}) + "\n")
    async with MockFleet([worker()]) as fleet:
        command = [str(program), "profile", "--model", MODEL, "--url", fleet.workers[0].url]
        command += ["--endpoint-type", "completions", "--streaming", "--use-server-token-count"]
        command += ["--tokenizer", str(_unused_tokenizer(folder / "tokenizer"))]
        command += ["--custom-dataset-type", "mooncake_trace", "--input-file", str(rows), "--fixed-schedule"]
        command += ["--artifact-dir", str(artifacts), "--export-level", "records", "--ui", "none"]
        log = folder / "aiperf.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output)
            if await process.wait():
                raise ToolMissing(f"aiperf ended with {process.returncode}:\n{log.read_text()[-2000:]}")
    lines = (artifacts / "profile_export.jsonl").read_text().splitlines()
    return [_their_request(json.loads(line)["metrics"]) for line in lines]


def _unused_tokenizer(folder: Path) -> Path:
    """The tool wants one although it sends bodies as they are and takes the server's counts."""
    folder.mkdir()
    Tokenizer(WordLevel({"x": 0}, unk_token="x")).save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "x"}')
    return folder


def _their_request(metrics: dict[str, dict[str, float]]) -> Request:
    return Request(metrics["time_to_first_token"]["value"], metrics["inter_token_latency"]["value"])


def installed() -> Path:
    """The `aiperf` program; installed on first use (a minute or two)."""
    cache = Path(os.environ.get("AIPERF_CACHE", Path.home() / f".cache/kvrelay/aiperf-{VERSION}"))
    program = cache / "venv/bin/aiperf"
    if not program.exists():
        print(f"installing aiperf {VERSION} into {cache} (once) ...", file=sys.stderr)
        pip = [str(cache / "venv/bin/python"), "-m", "pip", "install", "-q", f"aiperf=={VERSION}"]
        for command in ([sys.executable, "-m", "venv", str(cache / "venv")], pip):
            if (done := subprocess.run(command, capture_output=True, text=True, check=False)).returncode:
                raise ToolMissing(done.stderr[-2000:])
    return program


async def run() -> dict[str, list[Request]]:
    plan, program = same_requests(), installed()
    found: dict[str, list[Request]] = {"kvrelay": [], "aiperf": []}
    for number, tool in enumerate(ORDER):
        print(f"run {number + 1} of {len(ORDER)}: {tool} ...", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            if tool == "kvrelay":
                requests = await measured_by_us(plan)
            else:
                requests = await measured_by_aiperf(plan, program, Path(folder))
        assert len(requests) == REQUESTS, (tool, len(requests))
        found[tool] += requests
    return found


def compared(found: dict[str, list[Request]]) -> tuple[str, bool]:
    """A table for people, and whether every figure agrees."""
    lines = ["| figure | kvrelay | AIPerf | difference | limit |", "|---|---:|---:|---:|---|"]
    all_agree = True
    for name in ("ttft_ms", "itl_ms"):
        ours, theirs = ([getattr(request, name) for request in found[tool]] for tool in ("kvrelay", "aiperf"))
        for label, a, b in _figures(ours, theirs):
            off = (b - a) / a
            all_agree &= abs(off) <= LIMIT
            verdict = "within" if abs(off) <= LIMIT else "**beyond**"
            lines.append(f"| {name} {label} | {a:.2f} | {b:.2f} | {off:+.2%} | {verdict} {LIMIT:.0%} |")
    return "\n".join(lines), all_agree


def _figures(ours: Sequence[float], theirs: Sequence[float]) -> list[tuple[str, float, float]]:
    figures = [("mean", fmean(ours), fmean(theirs))]
    figures += [(f"p{p}", float(np.percentile(ours, p)), float(np.percentile(theirs, p))) for p in PERCENTILES]
    return figures


def main() -> int:
    try:
        found = asyncio.run(run())
    except ToolMissing as problem:
        print(f"error: no comparison: {problem}", file=sys.stderr)
        return 3
    table, all_agree = compared(found)
    counts = ", ".join(f"{len(requests)} requests by {tool}" for tool, requests in found.items())
    print(f"{table}\n\n{counts}; order {' '.join(ORDER)}; plan {same_requests().digest()[:16]}")
    return 0 if all_agree else 1


if __name__ == "__main__":
    raise SystemExit(main())
