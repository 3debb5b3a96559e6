"""Fleets of real mock worker processes, each set up wrongly in one way: the doctor finds it, and only it."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest

from kvrelay.core.doctor.finding import Finding, Verdict, examine, overall
from kvrelay.core.doctor.rules import RULES
from kvrelay.core.model.units import IndexState
from kvrelay.edge.doctor.collect import Wanted, collect
from kvrelay.edge.gateway.gateway import Gateway
from kvrelay.edge.system.config import load_config
from kvrelay.edge.system.ports import spare_port
from kvrelay.edge.worker.launch import MockFleet
from kvrelay.edge.worker.spec import MockSpec
from tests.edge.doctor.disguise import absent, disguised, replaced
from tests.edge.gateway.scripted import client_of, running, token_body, until

OK, WARN, FAIL = Verdict.OK, Verdict.WARN, Verdict.FAIL


@pytest.fixture(scope="module")
def mocks() -> Iterator[MockFleet]:
    with MockFleet([MockSpec(name="a", model="m"), MockSpec(name="b", model="m")]) as fleet:
        yield fleet


def entries(mocks: MockFleet, **first: object) -> list[dict[str, object]]:
    """The workers as a configuration has them; members of the first one can be set wrongly."""
    workers = [{"name": worker.spec.name, "url": worker.url} for worker in mocks.workers]
    workers[0] |= first  # type: ignore[arg-type]
    return workers  # type: ignore[return-value]


async def examined(
    workers: list[dict[str, object]], *, router_url: str | None = None, **flags: object
) -> tuple[Finding, ...]:
    settings = {"workers": workers, **{name.replace("__", "."): value for name, value in flags.items()}}
    config = load_config(Path("/dev/null"), {}, settings)
    return examine(await collect(Wanted(config=config, router_url=router_url)), RULES)


def troubles(findings: tuple[Finding, ...]) -> dict[tuple[str | None, str], Verdict]:
    return {(f.worker, f.code): f.verdict for f in findings if f.verdict in (WARN, FAIL, Verdict.UNKNOWN)}


def detail(findings: tuple[Finding, ...], worker: str | None, code: str) -> str:
    return next(finding.detail for finding in findings if (finding.worker, finding.code) == (worker, code))


@asynccontextmanager
async def beside(mocks: MockFleet, **other: object) -> AsyncIterator[list[dict[str, object]]]:
    """The healthy `a`, and `c`, a mock worker that was started otherwise."""
    spec = MockSpec(**{"name": "c", "model": "m", **other})  # type: ignore[arg-type]
    async with MockFleet([spec]) as more:
        yield [*entries(mocks)[:1], *entries(more)]


@pytest.mark.covers("S23")
async def test_a_healthy_fleet_is_well(mocks: MockFleet) -> None:
    findings = await examined(entries(mocks))
    assert troubles(findings) == {} and overall(findings) is OK
    async with running(workers=entries(mocks)) as gateway:
        await until(lambda: sum(worker.routable for worker in gateway.status().workers) == 2, within_s=20)
        findings = await examined([], router_url=gateway.admin_url)
        assert {f.worker for f in findings} == {"a", "b", None}, "the gateway's workers are examined as well"
        assert troubles(findings) == {}


async def test_a_worker_that_connects_to_its_listener_is_heard_by_the_doctor_or_the_gateway() -> None:
    endpoint = f"tcp://127.0.0.1:{spare_port()}"
    async with MockFleet([MockSpec(name="e", model="m", events=endpoint, events_mode="connect")]) as connecting:
        workers = [{"name": "e", "url": connecting.workers[0].url, "events": f"bind:{endpoint}"}]
        assert overall(await examined(workers)) is OK, "nobody else listens"
        async with running(workers=workers) as gateway:
            await until(lambda: _is_live(gateway), within_s=20)
            assert troubles(await examined(workers))[("e", "events_endpoint")] is Verdict.UNKNOWN
            findings = await examined(workers, router_url=gateway.admin_url)
            assert (
                detail(findings, "e", "events_endpoint") == "the running gateway listens there, and its index is live"
            )
            assert overall(findings) is OK


def _is_live(gateway: Gateway) -> bool:
    targets = [target for worker in gateway.status().workers for target in worker.targets]
    return bool(targets) and all(target.index_state is IndexState.LIVE for target in targets)


@pytest.mark.covers("S23")
async def test_1_a_worker_that_publishes_no_events(mocks: MockFleet) -> None:
    async with beside(mocks, events="none", replay="none") as workers:
        found = troubles(await examined(workers))
        assert found[("c", "events_published")] is FAIL and found[(None, "policy_has_index")] is WARN
        assert set(found) <= {
            ("c", "events_published"), ("c", "clock"), (None, "policy_has_index"), (None, "hashes_equal")
        }  # fmt: skip


@pytest.mark.covers("S23")
async def test_2_events_from_another_port(mocks: MockFleet) -> None:
    nowhere = f"tcp://127.0.0.1:{spare_port()}"
    findings = await examined(entries(mocks, events=nowhere))
    found = troubles(findings)
    assert found[("a", "events_endpoint")] is FAIL and found[("a", "events_heard")] is FAIL
    says = mocks.workers[0].ready.events
    assert detail(findings, "a", "events_endpoint") == f"nothing publishes at {nowhere}, the worker says {says}"
    assert "its replay had 1" in detail(findings, "a", "events_heard")
    assert all(worker != "b" for worker, _ in found)


@pytest.mark.covers("S23")
async def test_3_another_topic(mocks: MockFleet) -> None:
    findings = await examined(entries(mocks, topic="kv@elsewhere"))
    found = troubles(findings)
    assert found[("a", "events_topic")] is FAIL and found[("a", "events_heard")] is FAIL
    assert detail(findings, "a", "events_topic") == "subscribed is `kv@elsewhere`, published is `kv@a@m`"
    assert ("a", "events_endpoint") not in found


async def test_4_another_block_size_than_configured(mocks: MockFleet) -> None:
    findings = await examined(entries(mocks, block_size=32))
    assert troubles(findings) == {("a", "block_size"): FAIL}
    assert detail(findings, "a", "block_size") == "`block_size` is 32, the worker's blocks have 16 tokens"


async def test_5_block_sizes_that_differ_between_workers(mocks: MockFleet) -> None:
    async with beside(mocks, block_size_tokens=32) as workers:
        found = troubles(await examined(workers))
        assert found[(None, "block_sizes_equal")] is WARN


@pytest.mark.covers("S23")
async def test_6_a_tokenizer_that_cannot_be_loaded_or_is_another_one(mocks: MockFleet, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    broken, other = tmp_path / "broken.json", tmp_path / "tokenizer.json"
    broken.write_text("{}")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?")).save(str(other))
    findings = await examined(entries(mocks), tokens__tokenizer=str(broken))
    assert troubles(findings)[("a", "tokenizer")] is FAIL
    assert "cannot be used: not a tokenizer.json" in detail(findings, "a", "tokenizer")
    findings = await examined(entries(mocks), tokens__tokenizer=str(other))
    assert troubles(findings)[("a", "tokenizer")] is FAIL
    assert detail(findings, "a", "tokenizer").startswith("text: from token 0 on, 1 tokens here and ")


@pytest.mark.covers("S21")
async def test_7_a_chat_template_that_differs_between_workers(mocks: MockFleet) -> None:
    def other_template(status: int, body: bytes, headers: dict[str, str]) -> tuple[int, bytes, dict[str, str]]:
        answer = json.loads(body)
        return status, json.dumps({**answer, "tokens": [*answer["tokens"], 1]}).encode(), headers

    a, b = mocks.workers
    async with disguised(b.url, {"/tokenize": other_template}) as url:
        findings = await examined([{"name": "a", "url": a.url}, {"name": "b", "url": url}])
        assert troubles(findings) == {(None, "tokens_equal"): FAIL}
        assert re.match(
            r"text: from token \d+ on, \d+ tokens at a and \d+ at b", detail(findings, None, "tokens_equal")
        )


async def test_8_hits_that_are_not_reported(mocks: MockFleet) -> None:
    def without_details(status: int, body: bytes, headers: dict[str, str]) -> tuple[int, bytes, dict[str, str]]:
        answer = json.loads(body)
        answer["usage"]["prompt_tokens_details"] = None  # as vLLM without --enable-prompt-tokens-details
        return status, json.dumps(answer).encode(), headers

    async with disguised(mocks.workers[0].url, {"/v1/completions": without_details}) as url:
        assert troubles(await examined(entries(mocks, url=url))) == {("a", "usage_details"): FAIL}


async def test_9_no_metrics_page(mocks: MockFleet) -> None:
    async with disguised(mocks.workers[0].url, {"/metrics": absent}) as url:
        assert troubles(await examined(entries(mocks, url=url))) == {("a", "metrics"): FAIL}


async def test_10_an_engine_version_that_nobody_tested(mocks: MockFleet) -> None:
    def of_vllm(status: int, body: bytes, headers: dict[str, str]) -> tuple[int, bytes, dict[str, str]]:
        return status, body.replace(b'"owned_by":"kvrelay-mock"', b'"owned_by":"vllm"'), {}

    changes = {"/v1/models": of_vllm, "/version": replaced(b"0.1.0+mock", b"0.99.9")}
    async with disguised(mocks.workers[0].url, changes) as url:
        findings = await examined(entries(mocks, url=url, adapter="vllm"))
        assert troubles(findings)[("a", "engine_version")] is WARN
        assert detail(findings, "a", "engine_version") == "vllm 0.99.9; tested: 0.32.0"


@pytest.mark.covers("CC-20")
async def test_11_another_hash_seed(mocks: MockFleet) -> None:
    async with beside(mocks, hash_seed="7") as workers:
        findings = await examined(workers)
        assert troubles(findings) == {(None, "hashes_equal"): WARN}
        assert detail(findings, None, "hashes_equal") == "a and c give one prompt different block hashes"


@pytest.mark.covers("MK-11")
async def test_12_a_publisher_on_all_interfaces(mocks: MockFleet) -> None:
    async with beside(mocks, events=f"tcp://*:{spare_port()}", insecure=True) as workers:
        assert troubles(await examined(workers)) == {("c", "publisher_open"): WARN}


async def test_13_no_replay_or_one_that_does_not_answer(mocks: MockFleet) -> None:
    async with beside(mocks, replay="none") as workers:
        assert troubles(await examined(workers)) == {("c", "replay"): WARN}
    findings = await examined(entries(mocks, replay=f"tcp://127.0.0.1:{spare_port()}"))
    assert troubles(findings) == {("a", "replay"): FAIL}
    assert f"the worker says {mocks.workers[0].ready.replay}" in detail(findings, "a", "replay")


async def test_14_a_clock_that_is_wrong(mocks: MockFleet) -> None:
    def an_hour_ago(status: int, body: bytes, headers: dict[str, str]) -> tuple[int, bytes, dict[str, str]]:
        return status, body, {**headers, "date": format_datetime(datetime.now(UTC) - timedelta(hours=1), usegmt=True)}

    async with disguised(mocks.workers[0].url, {"/metrics": an_hour_ago}) as url:
        findings = await examined(entries(mocks, url=url, events="none"))
        assert troubles(findings)[("a", "clock")] is FAIL
        assert re.match(r"3[56]\d\d\.\d s behind ours", detail(findings, "a", "clock"))


async def test_15_caches_that_do_not_fit_into_the_machine(mocks: MockFleet) -> None:
    huge = replaced(b"enable_prefix_caching=", b'kv_offloading_size="1000000000000000",enable_prefix_caching=')
    async with disguised(mocks.workers[0].url, {"/metrics": huge}) as url:
        assert troubles(await examined(entries(mocks, url=url))) == {(None, "memory"): FAIL}


async def test_16_prefix_caching_switched_off(mocks: MockFleet) -> None:
    off = replaced(b'enable_prefix_caching="True"', b'enable_prefix_caching="False"')
    async with disguised(mocks.workers[0].url, {"/metrics": off}) as url:
        assert troubles(await examined(entries(mocks, url=url))) == {("a", "prefix_caching"): FAIL}


async def test_17_a_worker_that_was_not_warmed_up(mocks: MockFleet) -> None:
    slow_once = {"kind": "delay", "ms": 4000, "count": 1, "path": "/v1/completions"}
    async with beside(mocks, faults=(slow_once,)) as workers:
        assert troubles(await examined(workers)) == {("c", "cold_start"): WARN}


@pytest.mark.covers("MK-03")
async def test_18_a_cache_aware_policy_on_a_fleet_without_events(mocks: MockFleet) -> None:
    async with MockFleet([MockSpec(name="d", model="m", events="none", replay="none")]) as silent:
        findings = await examined(entries(silent))
        assert troubles(findings)[(None, "policy_has_index")] is FAIL and overall(findings) is FAIL
        balanced = await examined(entries(silent), gateway__policy="least_load")
        assert (None, "policy_has_index") not in troubles(balanced)


async def test_19_a_worker_that_is_down(mocks: MockFleet) -> None:
    findings = await examined([*entries(mocks), {"name": "gone", "url": f"http://127.0.0.1:{spare_port()}"}])
    assert troubles(findings)[("gone", "reachable")] is FAIL
    assert detail(findings, "gone", "reachable") == "connection refused"
    assert {worker for worker, _ in troubles(findings)} == {"gone"}


@pytest.mark.covers("S23")
async def test_20_a_gateway_to_which_no_event_comes(mocks: MockFleet) -> None:
    async with AsyncExitStack() as stack:
        wrong = entries(mocks, topic="kv@elsewhere", replay="none")[:1]
        gateway = await stack.enter_async_context(running(workers=wrong))
        await until(lambda: any(worker.routable for worker in gateway.status().workers), within_s=20)
        client = await stack.enter_async_context(client_of(gateway))
        for part in range(100):
            await client.post({**token_body(), "prompt": list(range(part * 2_000, part * 2_000 + 1_500))})
            if gateway.status().index_problem is not None:
                break
        findings = await examined(entries(mocks)[:1], router_url=gateway.admin_url)
        assert troubles(findings)[("a", "index")] is FAIL and troubles(findings)[(None, "policy_has_index")] is FAIL


@pytest.mark.covers("CN-08", "CC-18")
async def test_21_a_worker_that_fails_where_computing_was_declared(tmp_path: Path) -> None:
    """By the word of the connector inside the worker; what it is made of is said beside it."""
    store = {"tiers": [{"url": f"file://{tmp_path}"}], "failure_policy": "fail"}
    async with MockFleet([MockSpec(name="a", model="m", store=store)]) as fleet:
        workers = [{"name": "a", "url": fleet.workers[0].url, "kv_report": fleet.workers[0].url}]
        findings = await examined(workers)
        assert troubles(findings) == {("a", "load_failure_policy"): FAIL} and overall(findings) is FAIL
        assert detail(findings, "a", "load_failure_policy").endswith("`store.failure_policy` declares `recompute`")
        assert detail(findings, "a", "kv_versions").startswith("kvrelay ")
        assert troubles(await examined(workers, store__failure_policy="fail")) == {}
