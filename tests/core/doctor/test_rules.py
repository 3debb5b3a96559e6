"""Each rule over made-up facts: what is well, what is not, and what cannot be known."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvrelay.core.doctor.facts import (
    Facts,
    HostFacts,
    ProbeFacts,
    RouterFacts,
    RouterWorkerFacts,
    SourceFacts,
    StoreFacts,
    TokenizerFacts,
    WorkerFacts,
)
from kvrelay.core.doctor.finding import Finding, Verdict, examine, overall
from kvrelay.core.doctor.rules import RULES
from kvrelay.core.doctor.window_rules import WINDOW_RULES

TOKENS = {"text": (1, 2, 3), "chat": (4, 5), "tools": (6,)}
SOURCE = SourceFacts(
    rank=0,
    endpoint="tcp://127.0.0.1:5557",
    replay="tcp://127.0.0.1:5558",
    topic="kv@a",
    bind=False,
    said_endpoint="tcp://127.0.0.1:5557",
    said_replay="tcp://127.0.0.1:5558",
    said_topic="kv@a",
    raw_endpoint="ipc:///run/a",
    connected=True,
    replay_answered=True,
    topics_seen=("kv@a",),
    heard_batches=1,
    block_sizes=(16,),
    clock_ahead_s=0.01,
)
PROBE = ProbeFacts(
    prompt_tokens=49,
    first_s=0.3,
    second_s=0.1,
    usage_seen=True,
    counted_prompt_tokens=49,
    cached_first=0,
    cached_second=48,
    block_hashes=(7, 8, 9),
)
WORKER = WorkerFacts(
    name="a",
    url="http://127.0.0.1:8100",
    engine="vllm",
    version="0.32.0",
    models=("m",),
    has_event_stream=True,
    said_block_size=16,
    sources=(SOURCE,),
    probe=PROBE,
    has_metrics=True,
    cache_settings={
        "enable_prefix_caching": "True",
        "prefix_caching_hash_algo": "sha256",
        "kv_cache_memory_bytes": "100",
    },
    tokens=TOKENS,
    clock_ahead_s=0.0,
    is_local=True,
    http_open_to_all=False,
)
BELIEVED = RouterWorkerFacts(
    name="a",
    routable=True,
    index_state="live",
    index_problem=None,
    compared=100,
    over_claims=0,
    under_claims=1,
    resyncs=0,
    orphan_blocks=0,
    malformed_events=0,
)
ROUTER = RouterFacts(url="http://127.0.0.1:8001", policy="cache_load", workers=(BELIEVED,))
HEALTHY = Facts(
    policy="cache_load",
    workers=(WORKER, msgspec.structs.replace(WORKER, name="b")),
    tokenizer=TokenizerFacts(path="tokenizer.json", tokens=TOKENS),
    router=ROUTER,
    host=HostFacts(memory_bytes=1_000_000, free_bytes=500_000),
)


def change(value, **members):
    return msgspec.structs.replace(value, **members)


def worker(**members) -> Facts:
    """The fleet with another first worker."""
    return change(HEALTHY, workers=(change(WORKER, **members), HEALTHY.workers[1]))


def source(**members) -> Facts:
    return worker(sources=(change(SOURCE, **members),))


def probe(**members) -> Facts:
    return worker(probe=change(PROBE, **members))


def believed(**members) -> Facts:
    return change(HEALTHY, router=change(ROUTER, workers=(change(BELIEVED, **members),)))


def stores(*tried: StoreFacts, memory_gib: int = 256) -> Facts:
    """With these tiers, on a machine of that size."""
    return change(HEALTHY, host=HostFacts(memory_bytes=memory_gib << 30, stores=tried))


def connector(declared: str = "recompute", **members) -> Facts:
    """The first worker has a KV connector that can be asked."""
    return change(worker(reports_kv=True, **members), host=HostFacts(declared_failure_policy=declared))


def every(**members) -> Facts:
    """All workers alike."""
    return change(HEALTHY, workers=tuple(change(one, **members) for one in HEALTHY.workers))


def of(facts: Facts, code: str) -> Finding:
    """The first answer to that question."""
    return next(finding for finding in examine(facts, RULES) if finding.code == code)


@pytest.mark.covers("S23")
def test_a_healthy_fleet_is_well_in_every_respect() -> None:
    findings = examine(HEALTHY, RULES)
    assert {(f.code, f.verdict) for f in findings if f.verdict is not Verdict.OK} == {
        ("load_failure_policy", Verdict.NOT_APPLICABLE),
        ("kv_versions", Verdict.NOT_APPLICABLE),
        ("remote_tier", Verdict.NOT_APPLICABLE),
        ("index", Verdict.NOT_APPLICABLE),  # of b, which this gateway does not know
        ("drift", Verdict.NOT_APPLICABLE),
        *((rule.code, Verdict.NOT_APPLICABLE) for rule in WINDOW_RULES),  # no traffic was watched
    }
    assert overall(findings) is Verdict.OK


OK, WARN, FAIL, UNKNOWN, NONE = Verdict.OK, Verdict.WARN, Verdict.FAIL, Verdict.UNKNOWN, Verdict.NOT_APPLICABLE
GONE = "connection refused"
NOWHERE = change(SOURCE, connected=False, heard_batches=0, topics_seen=(), said_topic=None, block_sizes=())


@pytest.mark.parametrize(
    "facts, code, verdict, said",
    [
        (worker(problem=GONE), "reachable", FAIL, "connection refused"),
        (worker(problem=GONE, engine=None), "engine_version", UNKNOWN, "could not be asked"),
        (worker(version="0.99.1"), "engine_version", WARN, "vllm 0.99.1; tested: 0.32.0"),
        (worker(version="0.32.0+cpu"), "engine_version", OK, "vllm 0.32.0+cpu, tested"),
        (worker(version=None), "engine_version", UNKNOWN, "does not say its version"),
        (
            worker(engine="sglang", version="0.5.19"),
            "engine_version",
            WARN,
            "sglang 0.5.19: tested against its protocol",
        ),
        (worker(has_metrics=False), "metrics", FAIL, "no metrics page"),
        (worker(has_metrics=False, engine="openai"), "metrics", WARN, "no metrics page"),
        (worker(has_metrics=None), "metrics", UNKNOWN, "not asked"),
        (worker(missing_metrics=("waiting_requests",)), "metrics", WARN, "lacks waiting_requests"),
        (worker(cache_settings={"enable_prefix_caching": "False"}), "prefix_caching", FAIL, "is False"),
        (probe(cached_second=0), "prefix_caching", FAIL, "hit nothing"),
        (worker(probe=None, cache_settings=None), "prefix_caching", UNKNOWN, "no probe"),
        (probe(cached_second=None), "usage_details", FAIL, "prompt_tokens_details"),
        (
            worker(engine="openai", probe=change(PROBE, cached_second=None)),
            "usage_details",
            WARN,
            "prompt_tokens_details",
        ),
        (probe(usage_seen=False), "usage_details", WARN, "no usage at all"),
        (worker(probe=None), "usage_details", UNKNOWN, "no probe"),
        (probe(counted_prompt_tokens=50), "token_count", WARN, "49 token ids arrived as 50 tokens"),
        (worker(tokens={"text": (1, 9)}), "tokenizer", FAIL, "text: from token 1 on, 3 tokens here and 2 there"),
        (worker(tokens={}), "tokenizer", UNKNOWN, "not tokenized by the worker"),
        (change(HEALTHY, tokenizer=TokenizerFacts()), "tokenizer", NONE, "the workers are asked"),
        (
            change(HEALTHY, tokenizer=TokenizerFacts(path="t.json", problem="not a tokenizer.json")),
            "tokenizer",
            FAIL,
            "t.json cannot be used: not a tokenizer.json",
        ),
        (worker(tokens={**TOKENS, "tools": (7, 7)}), "template", FAIL, "tools: from token 0 on"),
        (worker(tokens={**TOKENS, "chat": None}), "template", UNKNOWN, "chat: not tokenized by the worker"),
        (source(clock_ahead_s=-30.0), "clock", WARN, "30.0 s behind ours"),
        (source(clock_ahead_s=7200.0), "clock", FAIL, "7200.0 s ahead of ours"),
        (worker(sources=(), clock_ahead_s=None), "clock", UNKNOWN, "neither an event nor a Date header"),
        (worker(sources=(), clock_ahead_s=5.0), "clock", WARN, "5.0 s ahead"),
        (probe(first_s=9.0, second_s=0.1), "cold_start", WARN, "the first probe took 9.00 s"),
        (probe(first_s=0.9, second_s=0.1), "cold_start", OK, "the first probe took 0.90 s"),
        (worker(http_open_to_all=True), "http_open", WARN, "all interfaces"),
        (worker(http_open_to_all=None), "http_open", NONE, "another machine"),
        (worker(sources=()), "events_published", FAIL, "names no source"),
        (worker(sources=(), sources_refused="beyond loopback"), "events_published", FAIL, "beyond loopback"),
        (worker(sources=(), events_switched_off=True), "events_published", WARN, "`events` is `none`"),
        (worker(sources=(), engine="llamacpp"), "events_published", WARN, "llamacpp publishes none"),
        (worker(sources=(), problem=GONE), "events_published", UNKNOWN, "could not be asked"),
        (
            source(connected=False, endpoint="tcp://127.0.0.1:1"),
            "events_endpoint",
            FAIL,
            "nothing publishes at tcp://127.0.0.1:1, the worker says tcp://127.0.0.1:5557",
        ),
        (
            change(source(connected=None, why_not_tried="the port is taken"), router=None),
            "events_endpoint",
            UNKNOWN,
            "the port is taken",
        ),
        (source(connected=None, why_not_tried="the port is taken"), "events_endpoint", OK, "the running gateway"),
        (source(connected=None, why_not_tried="taken", heard_batches=0), "events_heard", OK, "the running gateway"),
        (worker(sources=()), "events_endpoint", NONE, "no event source"),
        (source(topic="other@"), "events_topic", FAIL, "subscribed is `other@`, published is `kv@a`"),
        (source(topic="other@", topics_seen=()), "events_topic", FAIL, "published is `kv@a`"),
        (source(topics_seen=(), said_topic=None), "events_topic", UNKNOWN, "no event was seen"),
        (
            source(heard_batches=0),
            "events_heard",
            FAIL,
            "49 prompt tokens and no event came under the subscribed topic",
        ),
        (source(heard_batches=0, topics_seen=()), "events_heard", FAIL, "computed 49 prompt tokens and no event came"),
        (source(heard_batches=0, replayed_batches=1), "events_heard", FAIL, "its replay had 1"),
        (worker(probe=None), "events_heard", UNKNOWN, "no probe was sent"),
        (probe(problem="answered 500"), "events_heard", UNKNOWN, "the probe failed: answered 500"),
        (source(malformed="not msgpack"), "events_readable", FAIL, "not msgpack"),
        (source(heard_batches=0), "events_readable", UNKNOWN, "no event was seen"),
        (source(replay=None), "replay", WARN, "no replay endpoint"),
        (
            source(replay_answered=False, replay="tcp://127.0.0.1:9", replay_problem="no complete answer within 3 s"),
            "replay",
            FAIL,
            "tcp://127.0.0.1:9: no complete answer within 3 s, the worker says tcp://127.0.0.1:5558",
        ),
        (worker(wanted_block_size=32), "block_size", FAIL, "`block_size` is 32, the worker's blocks have 16 tokens"),
        (worker(said_block_size=32), "block_size", WARN, "says 32 tokens, its events carry 16"),
        (source(block_sizes=(16, 32)), "block_size", FAIL, "blocks of 16 and 32 tokens"),
        (worker(sources=(), said_block_size=None), "block_size", UNKNOWN, "neither"),
        (source(raw_endpoint="tcp://*:5557"), "publisher_open", WARN, "tcp://*:5557 is bound on all interfaces"),
        (worker(open_event_ports=(5558,)), "publisher_open", WARN, "port 5558 listens on all interfaces"),
        (every(sources=()), "policy_has_index", FAIL, "of no worker a single event comes"),
        (every(sources=(NOWHERE,)), "policy_has_index", FAIL, "of no worker a single event comes"),
        (worker(sources=()), "policy_has_index", WARN, "of a nothing can match"),
        (every(sources=(), events_switched_off=True), "policy_has_index", WARN, "what a, b hold is a guess"),
        (
            change(HEALTHY, router=change(ROUTER, index_problem="nothing can match: a: silent")),
            "policy_has_index",
            FAIL,
            "nothing can match: a: silent",
        ),
        (change(HEALTHY, router=change(ROUTER, policy="sticky")), "policy_has_index", NONE, "`sticky` needs no index"),
        (change(HEALTHY, workers=()), "policy_has_index", UNKNOWN, "no worker could be asked"),
        (source(block_sizes=(32,)), "block_sizes_equal", WARN, "a: 32; b: 16 tokens"),
        (probe(block_hashes=(1, 2, 3)), "hashes_equal", WARN, "a and b give one prompt different block hashes"),
        (probe(block_hashes=(7, 8)), "hashes_equal", OK, "2 workers"),
        (
            worker(cache_settings={"prefix_caching_hash_algo": "sha256_cbor"}),
            "hashes_equal",
            WARN,
            "a: sha256_cbor; b: sha256",
        ),
        (every(probe=None), "hashes_equal", UNKNOWN, "no events to compare"),
        (worker(tokens={**TOKENS, "chat": (4, 6)}), "tokens_equal", FAIL, "chat: from token 1 on"),
        (worker(tokens={**TOKENS, "chat": (4, 6)}, models=("x",)), "tokens_equal", NONE, "no two workers"),
        (worker(version="0.31.0"), "versions_equal", WARN, "a: vllm 0.31.0; b: vllm 0.32.0"),
        (worker(models=("n",)), "models", OK, "a: n; b: m"),
        (
            worker(cache_settings={"kv_cache_memory_bytes": "900000.0"}),
            "memory",
            FAIL,
            "caches of a, b may take 0.0 GiB of 0.0 GiB",
        ),
        (worker(cache_settings={"kv_offloading_size": "3"}), "memory", FAIL, "may take 3.0 GiB"),
        (
            change(HEALTHY, host=HostFacts(memory_bytes=1_000_000, has_accelerator=True)),
            "memory",
            NONE,
            "no worker on this machine",
        ),
        (every(is_local=False), "memory", NONE, "no worker on this machine"),
        (change(HEALTHY, host=HostFacts()), "memory", UNKNOWN, "not known"),
        (HEALTHY, "memory_left", OK, "are free"),
        (
            change(HEALTHY, host=HostFacts(memory_bytes=100 << 30, free_bytes=4 << 30)),
            "memory_left",
            FAIL,
            "4.0 GiB of",
        ),
        (change(HEALTHY, host=HostFacts(memory_bytes=100 << 30)), "memory_left", UNKNOWN, "not known"),
        (every(is_local=False), "memory_left", NONE, "no worker is on this machine"),
        (stores(StoreFacts(name="far", problem="connection refused")), "remote_tier", FAIL, "far: connection refused"),
        (
            stores(StoreFacts(name="far", write_ms=1.0, read_ms=90.0)),
            "remote_tier",
            WARN,
            "slower than the deadline: far",
        ),
        (stores(StoreFacts(name="far", write_ms=1.0, read_ms=2.0)), "remote_tier", OK, "reads in 2.0 ms"),
        (stores(StoreFacts(name="near", host_memory_bytes=120 << 30), memory_gib=128), "memory", FAIL, "tier near"),
        (connector(load_failure_policy="recompute"), "load_failure_policy", OK, "`recompute`, as declared"),
        (
            connector(load_failure_policy="fail"),
            "load_failure_policy",
            FAIL,
            "the worker's policy is `fail`, `store.failure_policy` declares `recompute`",
        ),
        (connector("fail", load_failure_policy="recompute"), "load_failure_policy", FAIL, "declares `fail`"),
        (connector("fallback", load_failure_policy="recompute"), "load_failure_policy", OK, "tiers below"),
        (connector(), "load_failure_policy", UNKNOWN, "does not say what it does"),
        (
            connector(kv_versions={"kvrelay": "0.1.0", "vllm": "0.32.0"}),
            "kv_versions",
            OK,
            "kvrelay 0.1.0 in vllm 0.32.0: tested, loaded KV equals computed KV",
        ),
        (
            connector(kv_versions={"kvrelay": "0.1.0", "vllm": "0.33.1"}),
            "kv_versions",
            WARN,
            "kvrelay 0.1.0 in vllm 0.33.1: never tried together",
        ),
        (
            connector(kv_versions={"kvrelay": "0.1.0", "vllm": "0.32.0", "lmcache": "9.9"}),
            "kv_versions",
            WARN,
            "lmcache 9.9 in vllm 0.32.0: never tried together",
        ),
        (connector(), "kv_versions", UNKNOWN, "does not say its version"),
        (change(HEALTHY, router=None), "router", NONE, "no gateway was named"),
        (change(HEALTHY, router=RouterFacts(url="u", problem="u: connection refused")), "router", FAIL, "refused"),
        (believed(routable=False), "router", FAIL, "routes nothing to a"),
        (believed(index_state="unusable", index_problem="silent"), "index", FAIL, "silent"),
        (believed(index_state="incomplete"), "index", WARN, "incomplete"),
        (believed(resyncs=3), "drift", WARN, "100 requests compared, 0 over-claimed, 1 under-claimed, 3 resyncs"),
        (believed(orphan_blocks=4), "drift", WARN, "4 blocks wait for parents"),
        (believed(malformed_events=2), "drift", FAIL, "2 malformed"),
        (believed(compared=0), "drift", NONE, "no request could be compared"),
    ],
)
@pytest.mark.covers("S23", "MK-03", "CN-08", "CC-18")
def test_what_is_wrong_is_found_by_its_own_rule(facts: Facts, code: str, verdict: Verdict, said: str) -> None:
    finding = of(facts, code)
    assert (finding.verdict, said in finding.detail) == (verdict, True), finding
    assert (finding.cause is not None and finding.fix is not None) == (verdict in (WARN, FAIL))


def test_every_rule_but_the_tier_that_is_not_built_can_be_well_and_can_be_not_well() -> None:
    """Of the parameters above, so that no rule is forgotten there; those about traffic have a file of their own."""
    marks = {mark.name: mark for mark in test_what_is_wrong_is_found_by_its_own_rule.pytestmark}
    shown = {parameters[1] for parameters in marks["parametrize"].args[1]}
    assert shown == {rule.code for rule in RULES} - {rule.code for rule in WINDOW_RULES}
    assert len({rule.code for rule in RULES}) == len(RULES)


@pytest.mark.parametrize(
    "facts, verdict",
    [
        (HEALTHY, Verdict.OK),
        (worker(version="0.99"), Verdict.WARN),
        (worker(has_metrics=None), Verdict.OK),
        (every(probe=None), Verdict.UNKNOWN),
        (worker(problem=GONE), Verdict.FAIL),
    ],
)
def test_the_verdict_over_all(facts: Facts, verdict: Verdict) -> None:
    assert overall(examine(facts, RULES)) is verdict


def test_nothing_examined_is_not_well() -> None:
    assert overall(()) is Verdict.UNKNOWN


def test_the_guide_explains_every_rule_in_its_own_words() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "guide" / "doctor.md").read_text(encoding="utf-8")
    for rule in RULES:
        about = f"### `{rule.code}`\n\n{rule.asks} (setting: `{rule.setting}`)"
        entry = f"{about}\n\n- Cause: {rule.cause}\n- Fix: {rule.fix}\n"
        assert entry in guide, f"docs/guide/doctor.md should have:\n{entry}"
