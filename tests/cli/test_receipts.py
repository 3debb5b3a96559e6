"""`kvrelay receipts` over files and over a scripted admin port."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import Result
from typer.testing import CliRunner

from kvrelay.cli.main import app
from kvrelay.cli.receipt_sources import tail_file
from kvrelay.core.model.units import Status
from kvrelay.core.receipts.receipt import Receipt
from kvrelay.edge.observe.explain import explain
from kvrelay.edge.observe.metrics import Metrics
from tests.edge.observe.samples import receipt
from tests.json_schema import violations


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["receipts", *arguments])


def lines(*receipts: Receipt) -> str:
    return "".join(msgspec.json.encode(one).decode() + "\n" for one in receipts)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "receipts.jsonl"
    path.write_text(
        lines(
            receipt("r-0", actual_cached_tokens=1280, actual_local_hits=80),
            receipt("r-1"),
            receipt("r-2", actual_cached_tokens=1296, actual_local_hits=81),
            receipt("r-3", actual_cached_tokens=None, status=Status.WORKER_LOST, failure_reason="worker_lost"),
        )
    )
    return path


class AdminPort(http.server.BaseHTTPRequestHandler):
    receipts = (receipt("r-9"), receipt("r-8"))
    seen_tokens: list[str | None] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.seen_tokens.append(self.headers.get("authorization"))
        if self.path.startswith("/admin/receipts?limit="):
            self._answer(200, {"receipts": self.receipts[: int(self.path.rpartition("=")[2])]})
        elif self.path == "/admin/receipts/r-8":
            self._answer(200, self.receipts[1])
        else:
            self._answer(404, {"error": "absent"})

    def _answer(self, status: int, body: object) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(msgspec.json.encode(body))

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def router() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), AdminPort)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_tail_prints_the_last_ones_oldest_first(file: Path) -> None:
    result = run("tail", str(file), "-n", "2")
    assert result.stdout == (
        "r-2  ok  B  cache_spill  claimed 1280 actual 1296 of 1600 tokens  ttft 41.5 ms\n"
        "r-3  worker_lost  B  cache_spill  claimed 1280 actual unknown of 1600 tokens  ttft 41.5 ms\n"
    )
    assert json.loads(run("tail", str(file), "-n", "1", "--json").stdout)["request_id"] == "r-3"
    assert run("tail", str(file), "-n", "0").stdout == ""


def test_tail_follows_a_file_through_a_rotation(file: Path) -> None:
    found: list[str] = []

    def follow() -> None:
        for one in tail_file(file, 1, follow=True):
            found.append(one.request_id)
            if one.request_id == "end":
                return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    _wait_for(lambda: found == ["r-3"])
    with file.open("a") as opened:
        whole = lines(receipt("r-4"))
        opened.write(whole[:20])
        opened.flush()
        opened.write(whole[20:])
    _wait_for(lambda: found[-1:] == ["r-4"])
    file.rename(file.with_name("receipts.jsonl.1"))
    file.write_text(lines(receipt("end")))
    thread.join(10)
    assert found == ["r-3", "r-4", "end"]


def test_tail_and_explain_ask_a_running_gateway(router: str, tmp_path: Path) -> None:
    assert [line.split()[0] for line in run("tail", "--router", router).stdout.splitlines()] == ["r-8", "r-9"]
    token = tmp_path / "token"
    token.write_text("t0k\n")
    explained = run("explain", "r-8", "--router", router, "--admin-token-file", str(token))
    assert explained.stdout == explain(receipt("r-8")) + "\n"
    assert AdminPort.seen_tokens[-1] == "Bearer t0k"
    absent = run("explain", "r-77", "--router", router)
    assert absent.exit_code == 2
    assert absent.stderr == (
        f"error: no receipt `r-77` in {router}\n"
        "  a running gateway keeps only the last receipts in memory\n"
        "hint: look into the receipt file with `--file`\n"
    )
    assert run("tail", "--router", f"{router}/elsewhere").stderr == (
        "error: cannot use the receipts\n"
        f"  {router}/elsewhere/admin/receipts?limit=10 answered 404: that is no admin port of a gateway"
        " (8001 unless set otherwise)\n"
    )


@pytest.mark.covers("RC-15")
def test_explain_by_line_and_by_request_id(file: Path) -> None:
    by_line = run("explain", f"{file}:2")
    by_id = run("explain", "r-1", "--file", str(file))
    assert by_line.stdout == by_id.stdout == explain(receipt("r-1")) + "\n"
    as_json = json.loads(run("explain", f"{file}:2", "--json").stdout)
    assert (as_json["stale_index_tokens"], as_json["terms_add_up"]) == (64, True)
    assert as_json["receipt"]["request_id"] == "r-1"
    assert run("explain", "r-77", "--file", str(file)).stderr == (
        f"error: no receipt `r-77` in {file}\n"
        "  older receipts are in the rotated files beside it (.1 is the newest of them)\n"
        f"hint: kvrelay receipts tail {file} shows the ids of its last receipts\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tail"], "error: nowhere to look for receipts\n"),
        (["explain", "r-1"], "error: nowhere to look for receipts\n"),
        (["tail", "absent.jsonl"], "error: cannot use the receipts\n  absent.jsonl: No such file or directory\n"),
        (
            ["tail", "--router", "http://127.0.0.1:1"],
            "error: cannot use the receipts\n  http://127.0.0.1:1: Connection refused\n",
        ),
        (["reconcile", "absent.jsonl"], "error: cannot use the input\n  absent.jsonl: No such file or directory\n"),
    ],
)
def test_what_cannot_be_used_is_said(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(message)


def test_a_line_that_is_no_receipt_is_named(file: Path) -> None:
    file.write_text(lines(receipt("r-0")) + "{}\n")
    result = run("reconcile", str(file))
    assert result.exit_code == 2
    assert f"{file}:2: Object missing required field `request_id`" in result.stderr


def test_a_page_that_has_no_metrics_is_named(file: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.txt"
    page.write_text("hello\n")
    result = run("reconcile", str(file), "--metrics", str(page))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: cannot use the input\n  {page} is no metrics page: ")


@pytest.mark.covers("RC-12", "RC-16")
def test_reconcile_keeps_both_sides_and_the_sign_of_the_difference(file: Path) -> None:
    result = run("reconcile", str(file), "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["by_status"] == {"ok": 3, "worker_lost": 1}
    assert (report["receipts"], report["compared"], report["actual_unknown"]) == (4, 3, 1)
    assert (report["claimed_tokens"], report["actual_cached_tokens"]) == (3 * 1280, 1280 + 1216 + 1296)
    stale = report["stale_index_tokens"]
    assert (stale["count"], stale["min"], stale["p50"], stale["max"], stale["sum"]) == (3, -16, 0, 64, 48)
    assert (stale["claimed_too_many"], stale["exact"], stale["claimed_too_few"]) == (1, 1, 1)
    assert report["manifest_digests"] == ["d1"]
    text = run("reconcile", str(file)).stdout
    assert (
        "claimed - actual   min -16, p50 0.0, p95 64.0, max 64.0, sum 48 (count 3: too many 1, exact 1, too few 1)\n"
        in text
    )
    assert text.endswith("verdict            pass (no metrics page to hold them against)\n")


@pytest.mark.covers("RC-18")
def test_reconcile_joins_a_metrics_page(file: Path, tmp_path: Path) -> None:
    metrics = Metrics()
    for line in file.read_bytes().splitlines():
        metrics.observe_receipt(msgspec.json.decode(line, type=Receipt))
    page = tmp_path / "metrics.txt"
    page.write_bytes(metrics.render())
    assert run("reconcile", str(file), "--metrics", str(page)).exit_code == 0
    metrics.observe_receipt(receipt("not in the file"))
    page.write_bytes(metrics.render())
    failed = run("reconcile", str(file), "--metrics", str(page))
    assert failed.exit_code == 1
    assert "fail               kvrelay_requests_total: receipts 4, metrics 5\n" in failed.stdout


def test_nothing_to_compare_is_unknown_and_not_a_pass(file: Path) -> None:
    file.write_text(lines(receipt("r-0", actual_cached_tokens=None)))
    result = run("reconcile", str(file))
    assert result.exit_code == 3
    assert result.stdout.endswith("verdict            unknown\n")


@pytest.mark.covers("RC-08", "RC-11")
def test_the_schema_accepts_receipts_and_refuses_what_is_none(file: Path) -> None:
    schema = json.loads(run("schema").stdout)
    good = json.loads(lines(receipt()))
    assert violations(schema, good) == []
    for change in (
        {"route_reason": "because"},
        {"status": "fine"},
        {"prompt": "once upon a time"},
        {"matched_tokens_at_route": "many"},
        {"candidates": [{"worker": "A"}]},
    ):
        assert violations(schema, {**good, **change}), change
    del good["status"]
    assert violations(schema, good)


@pytest.mark.covers("RC-17")
def test_a_receipt_has_no_member_that_could_hold_a_prompt() -> None:
    schema = json.loads(run("schema").stdout)
    receipt_members = set(schema["$defs"]["Receipt"]["properties"])
    forbidden = ("prompt", "messages", "token_ids", "text", "content", "input", "api_key")
    assert not receipt_members & set(forbidden)
    assert schema["$defs"]["Receipt"]["additionalProperties"] is False


def _wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
