"""`kvrelay serve` where it cannot start: whole messages."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvrelay.cli.main import app

Talk = Callable[..., str]


@pytest.fixture
def talk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Talk:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["serve", *arguments])
        assert (result.exit_code, result.stdout) == (2, "")
        return result.stderr

    return run


def test_an_address_in_use_is_named_with_its_port(talk: Talk) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert talk("--port", "0", "--admin-port", str(port)) == (
            f"error: the gateway could not start: 127.0.0.1:{port} is in use by another process\n"
            "hint: name other ports with `--port` and `--admin-port`; 0 takes free ones\n"
        )


def test_a_certificate_that_cannot_be_used_is_named(talk: Talk, tmp_path: Path) -> None:
    (tmp_path / "kvrelay.toml").write_text('[gateway]\nport = 0\ntls_cert = "c.pem"\ntls_key = "k.pem"\n')
    (tmp_path / "c.pem").write_text("no certificate")
    assert talk() == "error: the gateway could not start: k.pem: No such file or directory\n"
    (tmp_path / "k.pem").write_text("no key")
    assert talk().startswith(
        "error: the gateway could not start: c.pem and k.pem are no certificate and its key (PEM): "
    )


def test_a_file_that_is_not_there_is_named(talk: Talk, tmp_path: Path) -> None:
    (tmp_path / "kvrelay.toml").write_text('[[workers]]\nurl = "http://127.0.0.1:9"\napi_key_file = "absent.key"\n')
    assert talk("--port", "0", "--admin-port", "0") == (
        "error: the gateway could not start: absent.key: No such file or directory\n"
    )
