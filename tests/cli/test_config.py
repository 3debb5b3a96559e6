"""`kvrelay config`: what an operator sees, whole messages included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from kvrelay.cli.main import app


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments: str, env: dict[str, str] | None = None, file: str | None = None) -> Result:
        if file is not None:
            (tmp_path / "kvrelay.toml").write_text(file)
        return CliRunner().invoke(app, ["config", *arguments], env=env)

    return invoke


@pytest.mark.covers("S42")
def test_one_option_set_in_file_environment_and_flag_is_shown_with_its_source(run: Any) -> None:
    file = "[gateway]\nport = 1000\nadmin_port = 1001\n[health]\nfailures = 3\n"
    env = {"KVRELAY_GATEWAY__PORT": "2000", "KVRELAY_HEALTH__FAILURES": "4"}
    result = run("show", "--port", "3000", "--json", env=env, file=file)
    assert result.exit_code == 0
    shown = json.loads(result.stdout)
    assert shown["gateway.port"] == {"value": 3000, "source": "`--port`"}
    assert shown["health.failures"] == {"value": 4, "source": "environment KVRELAY_HEALTH__FAILURES"}
    assert shown["gateway.admin_port"] == {"value": 1001, "source": "kvrelay.toml"}
    assert shown["gateway.host"] == {"value": "127.0.0.1", "source": "default"}


def test_the_text_form_has_one_line_per_value(run: Any) -> None:
    result = run("show", "--worker", "HTTP://A:8000/v1/", "--policy", "sticky")
    lines = dict(line.split(" = ") for line in result.stdout.splitlines())
    lines = {name.strip(): value for name, value in lines.items()}
    assert lines["gateway.policy"] == '"sticky"  (`--policy`)'
    assert lines["workers[0].url"] == '"http://a:8000"  (`--worker`)'
    assert lines["workers[0].role"] == '"both"  (default)'


@pytest.mark.covers("S42")
def test_typos_stop_the_start_and_all_of_them_are_named(run: Any) -> None:
    result = run("show", env={"KVRELAY_HELTH__INTERVAL_S": "1"}, file="[affinity]\nttl = 300\n")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == (
        "error: unknown key `affinity.ttl` (from kvrelay.toml)\n"
        "  known here: `header`, `ttl_s`, `hard`\n"
        "hint: did you mean `affinity.ttl_s`?\n"
        "error: unknown key `helth` (from environment KVRELAY_HELTH__INTERVAL_S)\n"
        "  known here: `gateway`, `workers`, `health`, `affinity`, `retry`, `tokens`, `index`, `policy`, `receipts`,"
        " `observe`, `tracing`, `tenants`, `store`\n"
        "hint: did you mean `KVRELAY_HEALTH`?\n"
    )


@pytest.mark.covers("S42")
def test_a_variable_with_our_prefix_that_means_nothing_stops_the_start(run: Any) -> None:
    result = run("show", env={"KVRELAY_TURBO": "on"})
    assert result.exit_code == 2
    assert result.stderr.startswith("error: unknown key `turbo` (from environment KVRELAY_TURBO)\n")


def test_bad_values_unsupported_ones_and_unreadable_files(run: Any) -> None:
    result = run("show", "--policy", "cache_lod", env={"KVRELAY_TENANTS__ACME__TRUST_GROUP": "g"})
    assert result.stderr == (
        "error: `gateway.policy` is `cache_lod` (from `--policy`)\n"
        "  legal: `cache_load`, `least_load`, `random`, `round_robin`, `sticky`, `sticky_load`\n"
        "hint: did you mean `cache_load`?\n"
        "error: `tenants.acme.trust_group` is `g` (from environment KVRELAY_TENANTS__ACME__TRUST_GROUP)\n"
        "  not supported in this version; supported: `null`\n"
    )
    assert run("show", "-c", "absent.toml").stderr == (
        "error: cannot read the configuration file `absent.toml` (from `--config`)\n  No such file or directory\n"
    )
    assert run("show", "--worker", "http://a", "--worker", "http://A:80/v1").stderr == (
        "error: two workers have the url `http://a` (from `--worker`)\n"
        "  legal: each worker has a name and a url of its own\n"
    )
    assert run("show", env={"KVRELAY_WORKERS": '[{"name": "a"}]'}).stderr == (
        "error: `workers[0].url` is missing (from environment KVRELAY_WORKERS)\n  legal: every entry has its `url`\n"
    )


@pytest.mark.covers("S42")
def test_secrets_are_masked(run: Any, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("CANARY-TOKEN")
    env = {"KVRELAY_GATEWAY__ADMIN_TOKEN_FILE": "token"}
    shown = run("show", env=env).stdout + run("show", "--json", env=env).stdout
    assert "CANARY-TOKEN" not in shown
    refused = run("show", "--worker", "http://user:CANARY-PW@host")
    assert refused.exit_code == 2
    assert "CANARY-PW" not in refused.stderr + refused.stdout
    store = run("show", env={"KVRELAY_STORE__TIERS": '[{"kind": "valkey", "url": "valkey://:CANARY-PW@host"}]'})
    assert store.exit_code == 2
    assert "CANARY-PW" not in store.stderr + store.stdout


def test_explain_names_meaning_default_range_and_effect(run: Any) -> None:
    assert run("explain", "health.failures").stdout == (
        "health.failures = 2\n"
        "  Failures in a row that take a worker out.\n"
        "  Higher: calmer, slower.\n"
        "  legal: at least 1, at most 1000\n"
        "  environment: KVRELAY_HEALTH__FAILURES\n"
    )
    section = json.loads(run("explain", "gateway.timeouts", "--json").stdout)
    assert [one["key"] for one in section] == [
        "gateway.timeouts.connect_s",
        "gateway.timeouts.first_byte_s",
        "gateway.timeouts.idle_s",
        "gateway.timeouts.total_s",
    ]
    assert run("explain", "workers.url").exit_code == 0


@pytest.mark.covers("TU-09")
def test_every_key_says_what_it_means_and_what_turning_it_does(run: Any) -> None:
    keys = json.loads(run("explain", "--json").stdout)
    assert len(keys) > 50
    assert [one["key"] for one in keys if not (one["meaning"] and one["effect"])] == []
    printed = run("explain").stdout
    assert all(f"{one['key']} = " in printed and one["effect"] in printed for one in keys)


def test_explain_of_an_unknown_key_suggests_the_nearest(run: Any) -> None:
    result = run("explain", "health.failure")
    assert result.exit_code == 2
    assert result.stderr.endswith("hint: did you mean `health.failures`?\n")


def test_the_schema_is_json_schema_and_closed(run: Any) -> None:
    schema = json.loads(run("schema").stdout)
    assert schema["additionalProperties"] is False
    assert "gateway" in schema["properties"]
