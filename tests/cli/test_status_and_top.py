"""`kvrelay status` and `kvrelay top` against a real gateway in another thread, and receipts in colour."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvrelay.cli.main import app
from kvrelay.cli.receipt_colours import listed, printer, told
from kvrelay.edge.observe.explain import explain
from tests.edge.gateway.scripted import ScriptedWorker, client_of, running, stream, token_body
from tests.edge.observe.samples import receipt


@contextmanager
def busy_gateway() -> Iterator[str]:
    """Its admin URL. Requests go on as long as somebody looks; the commands have event loops of their own."""
    loop, up, over = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    urls: list[str] = []

    async def serve() -> None:
        workers = ScriptedWorker("a", stream), ScriptedWorker("b", stream)
        async with running(*workers) as gateway, client_of(gateway) as client:
            await client.post(token_body())
            urls.append(gateway.admin_url)
            up.set()
            while not over.is_set():
                await client.post(token_body())
                await asyncio.sleep(0.01)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    up.wait(20)
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(20)
        loop.close()


@pytest.fixture(scope="module")
def admin_url() -> Iterator[str]:
    with busy_gateway() as url:
        yield url


@pytest.mark.covers("OB-12")
def test_status_is_one_line_with_all_four_numbers(admin_url: str) -> None:
    result = CliRunner().invoke(app, ["status", "--router", admin_url, "--seconds", "0.5"])
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    parts = line.split(" | ")
    assert [part.partition(": ")[0] for part in parts] == ["TTFT", "hit rate", "throughput", "memory", "workers"]
    assert parts[3:] == ["memory: unavailable", "workers: 2 of 2 up"], "these workers report no KV use"
    as_json = CliRunner().invoke(app, ["status", "--router", admin_url, "--seconds", "0.5", "--json"])
    report = json.loads(as_json.stdout)
    assert report["ttft_count"] > 0 and report["requests_per_s"] > 0
    assert (report["kv_usage_ratio"], report["workers"], report["workers_down"]) == (None, 2, [])


def test_top_shows_workers_findings_and_requests(admin_url: str) -> None:
    result = CliRunner().invoke(app, ["top", "--router", admin_url, "--once"], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("kvrelay 0") and "policy cache_load (predict)" in lines[0]
    assert lines[1].startswith("TTFT: p50 ") and "memory: unavailable" in lines[1]
    assert [line.split()[:2] for line in lines[4:6]] == [["a", "routable"], ["b", "routable"]]
    assert "last requests" in result.stdout and "no trouble" in result.stdout
    pictures = CliRunner().invoke(app, ["top", "--router", admin_url, "--once", "--json"])
    assert [worker["name"] for worker in json.loads(pictures.stdout)["workers"]] == ["a", "b"]


@pytest.mark.parametrize("command", ["status", "top"])
def test_a_gateway_that_is_not_there_is_said_to_be(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--router", "http://127.0.0.1:9"])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and "http://127.0.0.1:9" in result.stderr


def test_receipts_are_coloured_for_terminals_only_and_say_the_same() -> None:
    text = explain(receipt())
    plain, coloured = io.StringIO(), io.StringIO()
    printer(Console(file=plain))(told(text))
    terminal = Console(file=coloured, force_terminal=True, color_system="standard", width=300, _environ={})
    printer(terminal)(told(text))
    assert plain.getvalue() == text + "\n"
    assert "\x1b[1mRequest r-1" in coloured.getvalue() and "\x1b[33m" in coloured.getvalue()
    printer(terminal)(listed("r-1  ok  B", "ok"))
    assert "\x1b[32m  ok  \x1b[0m" in coloured.getvalue()
    quiet = io.StringIO()
    printer(Console(file=quiet, force_terminal=True, _environ={"NO_COLOR": "1"}))(told(text))
    assert "\x1b[3" not in quiet.getvalue()
