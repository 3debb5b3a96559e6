"""`kvrelay scrape-map`: how a worker's metrics page is understood, before a dashboard is built on it."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import msgspec
import typer

from kvrelay.cli import messages
from kvrelay.edge.connectors.base import WorkerAnswerUnusable, WorkerUnreachable
from kvrelay.edge.connectors.survey import Survey, survey
from kvrelay.edge.system.urls import BadUrl, canonical_worker_url

app = typer.Typer(add_completion=False, rich_markup_mode=None)

TIMEOUT_S = 10.0


@app.command(epilog="Example: kvrelay scrape-map http://127.0.0.1:8100")
def scrape_map(
    url: str = typer.Argument(help="Base URL of a worker."),
    api_key_file: Path | None = typer.Option(None, "--api-key-file", help="File with the key that the worker wants."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON on stdout."),
) -> None:
    """Ask a worker which engine it is, and list what each of our metrics is called on its page, with its unit.

    What the page does not carry is `unavailable`; it is never taken for zero.
    """
    found = _survey(url, api_key_file)
    if as_json:
        sys.stdout.write(json.dumps(msgspec.to_builtins(found), indent=2) + "\n")
    else:
        sys.stdout.write(messages.metrics_found(found))


def _survey(url: str, api_key_file: Path | None) -> Survey:
    try:
        headers = {} if api_key_file is None else {"authorization": f"Bearer {api_key_file.read_text().strip()}"}
        return asyncio.run(survey(canonical_worker_url(url), headers, timeout_s=TIMEOUT_S))
    except BadUrl as error:
        messages.fail(messages.bad_value("URL", url, str(error), source="the command line"))
    except OSError as error:
        messages.fail(messages.unusable_input("the key file", error))
    except (WorkerUnreachable, WorkerAnswerUnusable) as error:
        messages.fail(messages.worker_says_nothing(url, str(error)), messages.UNKNOWN)
