"""Receipts on their way to disk: rotation, bounds, and nothing lost at the end."""

from __future__ import annotations

import logging
import resource
import signal
import threading
import time
from pathlib import Path

import pytest

from kvrelay.edge.observe import receipt_log
from kvrelay.edge.observe.receipt_file import BadReceipt, read_receipts
from kvrelay.edge.observe.receipt_log import ReceiptLog, receipt_file
from tests.edge.observe.samples import receipt


def ids(path: Path) -> list[str]:
    return [one.request_id for one in read_receipts(path)]


def test_what_was_written_is_in_the_file_after_close(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "receipts.jsonl"
    log = ReceiptLog(receipt_file(path, rotate_mb=64, keep=8))
    for number in range(500):
        log.write(receipt(f"r-{number}"))
    log.close()
    log.close()
    assert ids(path) == [f"r-{number}" for number in range(500)]
    assert next(iter(read_receipts(path))) == receipt("r-0")


def test_a_receipt_is_in_the_file_soon_without_any_close(tmp_path: Path) -> None:
    log = ReceiptLog(receipt_file(tmp_path / "r.jsonl", rotate_mb=64, keep=8))
    log.write(receipt("a"))
    deadline = time.monotonic() + 5
    while not ids(tmp_path / "r.jsonl") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ids(tmp_path / "r.jsonl") == ["a"]
    log.close()


def test_an_existing_file_is_continued(tmp_path: Path) -> None:
    for name in ("a", "b"):
        log = ReceiptLog(receipt_file(tmp_path / "r.jsonl", rotate_mb=64, keep=8))
        log.write(receipt(name))
        log.close()
    assert ids(tmp_path / "r.jsonl") == ["a", "b"]


def test_rotation_keeps_whole_lines_and_the_stated_number_of_files(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    log = ReceiptLog(receipt_file(path, rotate_mb=1, keep=2))
    padding = "x" * 100_000
    for number in range(45):
        log.write(receipt(f"{number}", session_id=padding))
    log.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["r.jsonl", "r.jsonl.1", "r.jsonl.2"]
    kept = [*ids(tmp_path / "r.jsonl.2"), *ids(tmp_path / "r.jsonl.1"), *ids(path)]
    assert kept == [str(number) for number in range(45 - len(kept), 45)]
    assert all(file.stat().st_size <= 2**20 for file in tmp_path.iterdir())


def test_nothing_kept_still_bounds_the_file(tmp_path: Path) -> None:
    log = ReceiptLog(receipt_file(tmp_path / "r.jsonl", rotate_mb=1, keep=0))
    for number in range(30):
        log.write(receipt(f"{number}", session_id="x" * 100_000))
    log.close()
    assert [file.name for file in tmp_path.iterdir()] == ["r.jsonl"]
    assert ids(tmp_path / "r.jsonl")[-1] == "29"


def test_a_rotation_that_fails_costs_its_receipts_and_not_those_after_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "kvrelay")
    path, in_the_way = tmp_path / "r.jsonl", tmp_path / "r.jsonl.1"
    in_the_way.mkdir()
    log = ReceiptLog(receipt_file(path, rotate_mb=1, keep=1))
    for number in range(12):
        log.write(receipt(f"{number}", session_id="x" * 100_000))
        log.flush()
    in_the_way.rmdir()
    log.write(receipt("late", session_id="x" * 100_000))
    log.close()
    assert [*ids(in_the_way), *ids(path)] == [*(str(number) for number in range(10)), "late"]


def test_a_full_disk_leaves_no_half_line(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    log = ReceiptLog(receipt_file(path, rotate_mb=64, keep=8))
    log.write(receipt("a"))
    log.flush()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, hard))
    try:
        log.write(receipt("b"))
        log.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    log.write(receipt("c"))
    log.close()
    assert ids(path) == ["a", "c"]


def test_the_last_receipts_are_in_memory_newest_first() -> None:
    log = ReceiptLog(recent=3)
    for name in "abcde":
        log.write(receipt(name))
    assert [one.request_id for one in log.recent(2)] == ["e", "d"]
    assert [one.request_id for one in log.recent(10)] == ["e", "d", "c"]
    assert (log.get("a"), log.get("c")) == (None, receipt("c"))
    log.close()


def test_a_disk_that_does_not_keep_up_costs_receipts_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Never the memory of the process, and never the time of a request."""
    monkeypatch.setattr(receipt_log, "MAX_PENDING_BYTES", 5_000)
    stuck = threading.Event()
    append = receipt_log._RotatedFile.append
    monkeypatch.setattr(
        receipt_log._RotatedFile, "append", lambda self, lines: (stuck.wait(10), append(self, lines))[0]
    )
    log = ReceiptLog(receipt_file(tmp_path / "r.jsonl", rotate_mb=64, keep=8))
    with caplog.at_level(logging.ERROR):
        for number in range(50):
            log.write(receipt(str(number)))
    stuck.set()
    log.close()
    written = ids(tmp_path / "r.jsonl")
    assert log.dropped > 0 and len(written) + log.dropped == 50
    assert "receipts dropped" in caplog.text
    assert log.get("49") is not None


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    log = ReceiptLog(receipt_file(path, rotate_mb=64, keep=8))
    log.write(receipt("a"))
    log.close()
    with path.open("a") as file:
        file.write('{"request_id": "b"}\n')
    with pytest.raises(BadReceipt, match=r"r\.jsonl:2: Object missing required field"):
        ids(path)
