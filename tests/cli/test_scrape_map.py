"""`kvrelay scrape-map`: engine, version and names of a worker's metrics, whole messages included."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvrelay.cli.main import app
from tests.conformance.connectors.doubles import DOUBLES
from tests.edge.connectors.serving import Pages, serving


@contextmanager
def served(pages: Pages) -> Iterator[str]:
    """From another thread: the command has an event loop of its own."""
    loop, up, over = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    urls: list[str] = []

    async def serve() -> None:
        async with serving(pages) as url:
            urls.append(url)
            up.set()
            await over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    up.wait(10)
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(10)
        loop.close()


@pytest.mark.covers("OB-09", "OB-10")
def test_a_page_is_listed_with_its_names_units_and_what_it_lacks() -> None:
    with served(DOUBLES["llamacpp"].pages) as url:
        result = CliRunner().invoke(app, ["scrape-map", url + "/v1"])
    assert result.exit_code == 0
    assert result.stdout == (
        f"{url}: llamacpp, version b11549\n"
        "  running_requests       llamacpp:requests_processing         requests\n"
        "  waiting_requests       llamacpp:requests_deferred           requests\n"
        "  kv_usage_ratio         unavailable                          ratio, 0 to 1\n"
        "  prefix_queries_tokens  llamacpp:prompt_tokens_total         tokens, total\n"
        "  prefix_hits_tokens     llamacpp:prompt_tokens_cached_total  tokens, total\n"
        "  hits_by_tier_tokens    unavailable                          tokens, total\n"
        "  process_start_s        unavailable                          seconds since the epoch\n"
        "  cache_config           unavailable                          labels\n"
    )


@pytest.mark.covers("OB-08", "OB-09", "TP-02")
@pytest.mark.parametrize(("engine", "version"), [("vllm", "0.32.0"), ("sglang", "0.5.23"), ("openai", None)])
def test_engine_and_version_are_detected(engine: str, version: str | None) -> None:
    with served(DOUBLES[engine].pages) as url:
        result = CliRunner().invoke(app, ["scrape-map", url, "--json"])
    found = json.loads(result.stdout)
    assert (found["engine"], found["version"]) == (engine, version)
    named = {one["canonical"] for one in found["metrics"] if one["name"] is not None}
    assert named == {one["canonical"] for one in found["metrics"]} - set(DOUBLES[engine].unavailable)


def test_who_cannot_be_asked_is_unknown_and_a_bad_url_a_usage_error(tmp_path: Path) -> None:
    with served({}) as url:
        pass
    result = CliRunner().invoke(app, ["scrape-map", url])
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr == (
        f"error: `{url}` cannot be asked: connection refused\nhint: is it the base URL of a running worker?\n"
    )
    result = CliRunner().invoke(app, ["scrape-map", "ftp://x"])
    assert (result.exit_code, result.stderr) == (
        2,
        "error: `URL` is `ftp://x` (from the command line)\n  legal: a worker URL begins with http:// or https://\n",
    )
    result = CliRunner().invoke(app, ["scrape-map", url, "--api-key-file", str(tmp_path / "none")])
    assert result.exit_code == 2
    assert result.stderr == f"error: cannot use the key file\n  {tmp_path}/none: No such file or directory\n"
