"""`kvrelay doctor` over two real vLLM workers: well as they are; what is wrong on the router's side is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvrelay.core.doctor.finding import Finding, Verdict, examine, overall
from kvrelay.core.doctor.rules import RULES
from kvrelay.edge.doctor.collect import Wanted, collect
from kvrelay.edge.system.config import load_config
from kvrelay.edge.system.ports import spare_port
from tests.real.conftest import gateway
from tests.real.engine import BLOCK_SIZE, MODEL_NAME, VllmWorker, installed

pytestmark = [pytest.mark.real, pytest.mark.timeout(1500)]

Pair = tuple[VllmWorker, VllmWorker]
FAIL, WARN = Verdict.FAIL, Verdict.WARN


async def examined(
    workers: Pair, *, router_url: str | None = None, tokens: dict[str, Any] | None = None, **first: Any
) -> tuple[Finding, ...]:
    entries: list[dict[str, Any]] = [{"name": worker.name, "url": worker.url} for worker in workers]
    entries[0] |= first
    settings = {"workers": entries, **{f"tokens.{name}": str(path) for name, path in (tokens or {}).items()}}
    config = load_config(Path("/dev/null"), {}, settings)
    return examine(await collect(Wanted(config=config, router_url=router_url)), RULES)


def troubles(findings: tuple[Finding, ...]) -> dict[tuple[str | None, str], Verdict]:
    return {(f.worker, f.code): f.verdict for f in findings if f.verdict not in (Verdict.OK, Verdict.NOT_APPLICABLE)}


def detail(findings: tuple[Finding, ...], code: str, worker: str | None = "a") -> str:
    return next(finding.detail for finding in findings if (finding.worker, finding.code) == (worker, code))


@pytest.mark.covers("S23", "TP-01")
async def test_a_healthy_fleet_and_its_gateway_are_well(workers: Pair, tmp_path: Path) -> None:
    await examined(workers)  # the first request of a worker's life pays for one-off work
    with gateway(workers, tmp_path / "r.jsonl") as client:
        findings = await examined(workers, router_url=client.admin_url)
    assert troubles(findings) == {}, [finding for finding in findings if finding.verdict is not Verdict.OK]
    assert overall(findings) is Verdict.OK
    assert detail(findings, "engine_version") == "vllm 0.32.0, tested"
    assert detail(findings, "block_size") == f"{BLOCK_SIZE} tokens"
    assert detail(findings, "prefix_caching") == f"{3 * BLOCK_SIZE} of {3 * BLOCK_SIZE + 1} tokens hit when sent again"
    assert detail(findings, "hashes_equal", None) == "2 workers give one prompt the same block hashes"
    assert detail(findings, "memory", None).startswith("caches of a, b may take 2.0 GiB of ")


@pytest.mark.covers("S23")
async def test_what_is_wrong_on_the_routers_side_is_found(workers: Pair) -> None:
    nowhere = f"tcp://127.0.0.1:{spare_port()}"
    findings = await examined(workers, events=nowhere)
    assert troubles(findings)[("a", "events_endpoint")] is troubles(findings)[("a", "events_heard")] is FAIL
    assert detail(findings, "events_endpoint").startswith(f"nothing publishes at {nowhere}, the worker says ipc://")

    findings = await examined(workers, topic="kv@prod")
    assert troubles(findings)[("a", "events_topic")] is troubles(findings)[("a", "events_heard")] is FAIL
    assert detail(findings, "events_topic") == f"subscribed is `kv@prod`, published is `kv@a@{MODEL_NAME}`"

    findings = await examined(workers, block_size=16)
    assert troubles(findings) == {("a", "block_size"): FAIL}

    findings = await examined(workers, replay=nowhere)
    assert troubles(findings) == {("a", "replay"): FAIL}

    findings = await examined(workers, events="none")
    assert troubles(findings)[("a", "events_published")] is WARN

    findings = await examined(workers, url=f"http://127.0.0.1:{spare_port()}")
    assert troubles(findings)[("a", "reachable")] is FAIL


@pytest.mark.covers("S21", "S23")
async def test_the_served_tokenizer_is_told_from_others(workers: Pair, tmp_path: Path) -> None:
    served = installed().model
    files = {"tokenizer": served / "tokenizer.json", "template": served / "chat_template.jinja"}
    findings = await examined(workers, tokens=files)
    assert troubles(findings) == {}, detail(findings, "template")

    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")
    findings = await examined(workers, tokens={"tokenizer": broken})
    assert troubles(findings)[("a", "tokenizer")] is FAIL

    other = tmp_path / "other.json"
    known = json.loads(files["tokenizer"].read_text())
    vocabulary = known["model"]["vocab"]
    vocabulary["n"], vocabulary["t"] = vocabulary["t"], vocabulary["n"]
    other.write_text(json.dumps(known))
    findings = await examined(workers, tokens={**files, "tokenizer": other})
    assert troubles(findings)[("a", "tokenizer")] is FAIL

    template = tmp_path / "other.jinja"
    template.write_text("{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}")
    findings = await examined(workers, tokens={**files, "template": template})
    assert troubles(findings)[("a", "template")] is FAIL
