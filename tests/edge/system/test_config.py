"""Precedence, provenance, and every way in which a configuration can be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.edge.connectors.registry import CONNECTORS
from kvrelay.edge.system.config import (
    Config,
    ConfigError,
    Problem,
    keys,
    load_config,
    router_settings,
    run_digest,
)

PUBLISHED = """
gateway.host gateway.port gateway.admin_host gateway.admin_port gateway.policy gateway.scorer gateway.processes
gateway.admin_token_file gateway.tls_cert gateway.tls_key gateway.timeouts.connect_s gateway.timeouts.first_byte_s
gateway.timeouts.idle_s gateway.timeouts.total_s gateway.limits.body_bytes gateway.limits.header_bytes
gateway.limits.queue_depth gateway.limits.queue_wait_s gateway.drain.grace_s workers[].url workers[].name
workers[].model workers[].role workers[].api_key_file workers[].events workers[].replay workers[].topic
workers[].adapter health.interval_s health.timeout_s health.failures health.successes affinity.header affinity.ttl_s
affinity.hard retry.attempts retry.budget_ratio retry.migrate tokens.tokenizer tokens.template tokens.cache_mb
policy.cache_load.alpha policy.cache_load.beta policy.cache_load.gamma policy.cache_load.delta receipts.path
receipts.rotate_mb receipts.keep tenants.NAME.api_keys_file tenants.NAME.salt_file tenants.NAME.trust_group
tenants.NAME.retention_s store.failure_policy store.deadline_ms store.tiers[].kind store.tiers[].url
store.tiers[].bytes store.tiers[].ttl_s
"""


def problems(
    env: dict[str, str] | None = None, flags: dict[str, object] | None = None, path: Path | None = None
) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as raised:
        load_config(path, env, flags)
    return raised.value.problems


def the_problem(env: dict[str, str]) -> Problem:
    (problem,) = problems(env)
    return problem


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kvrelay.toml"


@pytest.mark.covers("S42")
def test_flag_beats_environment_beats_file_beats_default(file: Path) -> None:
    file.write_text("[gateway]\nport = 1\nadmin_port = 2\nhost = 'a'\n[gateway.timeouts]\nconnect_s = 3\n")
    env = {"KVRELAY_GATEWAY__PORT": "11", "KVRELAY_GATEWAY__ADMIN_PORT": "12", "PATH": "/bin"}
    config = load_config(file, env, {"gateway.port": 21, "gateway.policy": None})
    gateway = config.gateway
    assert (gateway.port, gateway.admin_port, gateway.host, gateway.policy) == (21, 12, "a", "cache_load")
    assert gateway.timeouts.connect_s == 3.0
    assert [config.source_of(f"gateway.{key}") for key in ("port", "admin_port", "host", "policy")] == [
        "`--port`",
        "environment KVRELAY_GATEWAY__ADMIN_PORT",
        str(file),
        "default",
    ]


def test_everything_has_a_default() -> None:
    assert load_config(env={}, flags={}).gateway.port == 8000


def test_the_file_in_the_working_directory_is_read_by_itself(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("[retry]\nattempts = 5\n")
    monkeypatch.chdir(file.parent)
    config = load_config()
    assert (config.retry.attempts, config.source_of("retry.attempts")) == (5, "kvrelay.toml")


@pytest.mark.covers("S42")
def test_all_problems_are_reported_at_once(file: Path) -> None:
    file.write_text("[gatway]\nport = 1\n[health]\nintervall_s = 2\n[[workers]]\nurl = 'ftp://x'\n")
    found = problems({"KVRELAY_GATEWAY__PROT": "1"}, {"gateway.policy": "cache_lod"}, file)
    assert {(problem.kind, problem.key, problem.source, problem.nearest) for problem in found} == {
        ("unknown_key", "gatway", str(file), "gateway"),
        ("unknown_key", "health.intervall_s", str(file), "health.interval_s"),
        ("bad_value", "workers[0].url", str(file), None),
        ("unknown_key", "gateway.prot", "environment KVRELAY_GATEWAY__PROT", "KVRELAY_GATEWAY__PORT"),
        ("bad_value", "gateway.policy", "`--policy`", "cache_load"),
    }


def test_the_right_key_in_the_wrong_table_is_sent_to_its_table() -> None:
    assert the_problem({"KVRELAY_GATEWAY__CONNECT_S": "1"}).nearest == "KVRELAY_GATEWAY__TIMEOUTS__CONNECT_S"


@pytest.mark.parametrize(
    ("variable", "value", "legal"),
    [
        ("GATEWAY__PORT", "70000", "at least 0, at most 65535"),
        ("GATEWAY__PORT", "many", "a whole number"),
        ("HEALTH__FAILURES", "0", "at least 1, at most 1000"),
        ("GATEWAY__INSECURE", "perhaps", "true or false"),
        ("GATEWAY__TIMEOUTS__IDLE_S", "inf", "more than 0, at most 86400"),
        ("GATEWAY__TIMEOUTS__IDLE_S", "nan", "more than 0, at most 86400"),
    ],
)
def test_values_out_of_range_echo_the_value_and_the_range(variable: str, value: str, legal: str) -> None:
    problem = the_problem({f"KVRELAY_{variable}": value})
    assert (problem.kind, problem.received, problem.legal) == ("bad_value", value, legal)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TENANTS__ACME__TRUST_GROUP", "g"),
        ("WORKERS", '[{"url": "http://a", "role": "prefill"}]'),
    ],
)
def test_what_has_no_effect_yet_is_refused_and_not_swallowed(variable: str, value: str) -> None:
    assert the_problem({f"KVRELAY_{variable}": value}).kind == "unsupported"


def test_stating_the_default_of_what_is_not_built_yet_is_fine() -> None:
    load_config(env={"KVRELAY_GATEWAY__PROCESSES": "1", "KVRELAY_STORE__FAILURE_POLICY": "recompute"})


def test_workers_from_the_environment() -> None:
    config = load_config(env={"KVRELAY_WORKERS": "http://A:8000/v1, b:9"})
    assert [(worker.name, worker.url) for worker in config.workers] == [
        ("a:8000", "http://a:8000"),
        ("b:9", "http://b:9"),
    ]
    json = load_config(env={"KVRELAY_WORKERS": '[{"url": "http://a", "name": "x", "events": "none"}]'})
    assert (json.workers[0].name, json.workers[0].events) == ("x", "none")


@pytest.mark.parametrize(
    ("workers", "legal"),
    [
        ('[{"url": "http://a", "events": "udp://x"}]', "`auto`, `none`, tcp://HOST:PORT"),
        ('[{"url": "http://a", "name": "a/b"}]', "letters, digits"),
        ('[{"name": "x"}]', "every entry has its `url`"),
    ],
)
def test_workers_that_cannot_be(workers: str, legal: str) -> None:
    assert the_problem({"KVRELAY_WORKERS": workers}).legal.startswith(legal)


@pytest.mark.parametrize("adapter", ["auto", "vllm", "sglang", "llamacpp", "openai", "mock"])
def test_every_kind_of_engine_can_be_forced(adapter: str) -> None:
    config = load_config(env={"KVRELAY_WORKERS": f'[{{"url": "http://a", "adapter": "{adapter}"}}]'})
    assert config.workers[0].adapter == adapter
    assert adapter == "auto" or adapter in CONNECTORS


@pytest.mark.parametrize(("wrong", "nearest"), [("sglangg", "sglang"), ("llama.cpp", "llamacpp"), ("vlm", "vllm")])
def test_a_wrong_kind_of_engine_gets_the_nearest_one(wrong: str, nearest: str) -> None:
    problem = the_problem({"KVRELAY_WORKERS": f'[{{"url": "http://a", "adapter": "{wrong}"}}]'})
    assert (problem.kind, problem.received, problem.nearest) == ("bad_value", wrong, nearest)
    assert "`llamacpp`" in problem.legal


@pytest.mark.parametrize(
    ("workers", "twice"),
    [
        ('[{"url": "http://a", "name": "x"}, {"url": "http://b", "name": "x"}]', "name `x`"),
        ('[{"url": "http://a"}, {"url": "http://A:80/v1/"}]', "url `http://a`"),
        ('[{"url": "http://a", "name": "x"}, {"url": "http://A:80/v1/"}]', "url `http://a`"),
    ],
)
def test_two_workers_of_one_name_or_url_are_refused(workers: str, twice: str) -> None:
    problem = the_problem({"KVRELAY_WORKERS": workers})
    assert (problem.kind, problem.received) == ("duplicate", twice)


def test_a_certificate_comes_with_its_key() -> None:
    problem = the_problem({"KVRELAY_GATEWAY__TLS_CERT": "c.pem"})
    assert (problem.kind, problem.key) == ("missing", "gateway.tls_key")
    assert problem.source == "environment KVRELAY_GATEWAY__TLS_CERT"
    assert problem.legal == "set both `tls_cert` and `tls_key`, or neither"


def test_files_that_cannot_be_read(file: Path) -> None:
    (missing,) = problems(path=file)
    assert (missing.kind, missing.legal) == ("unreadable", "No such file or directory")
    file.write_text("[gateway\n")
    (broken,) = problems(path=file)
    assert broken.kind == "unreadable" and broken.legal.startswith("not TOML: ")


def test_a_value_where_a_table_belongs() -> None:
    assert the_problem({"KVRELAY_GATEWAY": "fast"}).key == "gateway"


def test_every_key_says_what_it_means_and_what_changing_it_does() -> None:
    for dotted, info in keys():
        assert info.description, dotted
        assert isinstance(info.json_schema_extra, dict) and info.json_schema_extra.get("effect"), dotted


def test_the_published_keys_are_all_there() -> None:
    assert set(PUBLISHED.split()) <= {dotted for dotted, _ in keys()}


def test_the_routers_settings_are_the_configurations_words() -> None:
    config = load_config(
        env={
            "KVRELAY_GATEWAY__POLICY": "sticky",
            "KVRELAY_AFFINITY__TTL_S": "0",
            "KVRELAY_POLICY__CACHE_LOAD__BETA": "0.45",
            "KVRELAY_RETRY__ATTEMPTS": "2",
        }
    )
    settings = router_settings(config, key_seed=b"k", manifest_digest="d")
    assert (settings.policy, settings.affinity_ttl_s, settings.weights.beta, settings.retry_attempts) == (
        "sticky",
        None,
        0.45,
        2,
    )
    assert (settings.key_seed, settings.manifest_digest) == (b"k", "d")


def test_defaults_of_the_routing_keys_are_the_routers_own() -> None:
    settings = router_settings(Config(), key_seed=b"", manifest_digest=None)
    assert settings == type(settings)(place=settings.place), "all but where the gateway is"


@pytest.mark.covers("RC-16")
def test_a_run_without_a_manifest_of_its_own_is_named_by_what_decides_it() -> None:
    config = load_config(env={})
    digest = run_digest(config, version="1", seed=7)
    assert digest == run_digest(load_config(env={"KVRELAY_GATEWAY__PORT": "8000"}), version="1", seed=7)
    other = load_config(env={"KVRELAY_GATEWAY__POLICY": "random"})
    assert len({digest, run_digest(config, version="2", seed=7), run_digest(config, version="1", seed=8)}) == 3
    assert digest != run_digest(other, version="1", seed=7)


def test_the_guide_names_every_key() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text(encoding="utf-8")
    missing = [dotted for dotted, _ in keys() if f"| `{dotted.rpartition('.')[2]}` |" not in guide]
    assert missing == []
