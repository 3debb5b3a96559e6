"""`kvrelay receipts`: follow them, have one explained, and hold claims against outcomes."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.text import Text

from kvrelay.cli import messages
from kvrelay.cli.admin_client import AdminClient, AdminUnavailable
from kvrelay.cli.command_group import CommandGroup
from kvrelay.cli.receipt_colours import listed, printer, told
from kvrelay.cli.receipt_sources import find_receipt, tail_file, tail_router
from kvrelay.cli.reporting import EXIT_OF_VERDICT, print_json
from kvrelay.core.receipts.receipt import Receipt
from kvrelay.core.receipts.reconcile import Reconciled, reconcile, stale_index_tokens
from kvrelay.core.stats.distribution import distribution
from kvrelay.edge.observe.explain import explain, printable, terms_add_up
from kvrelay.edge.observe.metrics_join import Comparison, compare, totals_of_page
from kvrelay.edge.observe.receipt_file import BadReceipt, read_receipts, receipt_schema

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Read route receipts: tail, explain, reconcile.",
)

ROUTER = typer.Option(None, "--router", metavar="URL", help="Admin URL of a running gateway.")
TOKEN_FILE = typer.Option(None, "--admin-token-file", help="File with the gateway's admin token.")
JSON = typer.Option(False, "--json", help="Print JSON on stdout.")


@app.command(epilog="Example: kvrelay receipts tail --router http://127.0.0.1:8001 -n 5 --follow")
def tail(
    file: Path | None = typer.Argument(None, help="Receipt file."),
    router: str | None = ROUTER,
    lines: int = typer.Option(10, "-n", "--lines", min=0, help="How many to begin with."),
    follow: bool = typer.Option(False, "-f", "--follow", help="Go on with new ones until interrupted."),
    as_json: bool = JSON,
    token_file: Path | None = TOKEN_FILE,
) -> None:
    """Print the last receipts, oldest first."""
    if router is not None:
        receipts = tail_router(AdminClient(router, token_file), lines, follow)
    elif file is not None:
        receipts = tail_file(file, lines, follow)
    else:
        messages.fail(messages.no_receipt_source())
    write = printer()
    try:
        for receipt in receipts:
            write(Text(_json(receipt)) if as_json else listed(_line(receipt), receipt.status.value))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:  # `| head` has seen enough; Python would complain once more when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(messages.OK) from None
    except (BadReceipt, AdminUnavailable, OSError) as error:
        messages.fail(messages.unusable_input("the receipts", error))


@app.command(
    name="explain",
    short_help="Tell one receipt in words.",
    epilog="Example: kvrelay receipts explain runs/receipts.jsonl:17",
)
def explain_command(
    target: str = typer.Argument(..., metavar="REQUEST_ID|FILE:LINE", help="Which receipt."),
    file: Path | None = typer.Option(None, "--file", help="Receipt file to look for the request id in."),
    router: str | None = ROUTER,
    as_json: bool = JSON,
    token_file: Path | None = TOKEN_FILE,
) -> None:
    """Tell one receipt in words: who was a candidate, why one was chosen, what was claimed and what was hit."""
    try:
        receipt = find_receipt(target, file, AdminClient(router, token_file) if router is not None else None)
    except (BadReceipt, AdminUnavailable, OSError) as error:
        messages.fail(messages.unusable_input("the receipts", error))
    printer()(Text(_explained_json(receipt)) if as_json else told(explain(receipt)))


@app.command(
    name="reconcile",
    short_help="Hold claims against what the engines reported.",
    epilog="Example: kvrelay receipts reconcile receipts.jsonl --metrics metrics.txt",
)
def reconcile_command(
    files: list[Path] = typer.Argument(..., help="Receipt files."),
    metrics: Path | None = typer.Option(None, "--metrics", help="The /metrics page at the end of their time window."),
    metrics_before: Path | None = typer.Option(None, "--metrics-before", help="The page at its beginning."),
    as_json: bool = JSON,
) -> None:
    """Hold what was claimed at routing time against what the engines reported, over whole files.

    Exit code 0, or 1 when receipts and metrics disagree by more than 1 %, or 3 when nothing could be compared.
    """
    try:
        receipts = [receipt for file in files for receipt in read_receipts(file)]
        comparisons = _against_metrics(receipts, metrics, metrics_before)
    except (BadReceipt, OSError, ValueError) as error:
        messages.fail(messages.unusable_input("the input", error))
    report = _report(receipts, comparisons)
    sys.stdout.write((msgspec.json.encode(report).decode() if as_json else _report_text(report)) + "\n")
    raise SystemExit(EXIT_OF_VERDICT[report["verdict"]])


@app.command(epilog="Example: kvrelay receipts schema > receipt.schema.json")
def schema() -> None:
    """Print the JSON schema of a receipt line."""
    print_json(receipt_schema())


# --- what is printed -------------------------------------------------------------------------------------------------


def _json(receipt: Receipt) -> str:
    return msgspec.json.encode(receipt).decode()


def _line(receipt: Receipt) -> str:
    claimed = _or_unknown(receipt.matched_tokens_at_route)
    actual = _or_unknown(receipt.actual_cached_tokens)
    ttft = "unknown" if receipt.ttft_ms is None else f"{receipt.ttft_ms:.1f} ms"
    return printable(
        f"{receipt.request_id}  {receipt.status}  {receipt.chosen_worker or '-'}  {receipt.route_reason}"
        f"  claimed {claimed} actual {actual} of {_or_unknown(receipt.eligible_prefix_tokens)} tokens  ttft {ttft}"
    )


def _or_unknown(value: int | None) -> str:
    return "unknown" if value is None else str(value)


def _explained_json(receipt: Receipt) -> str:
    report = {
        "receipt": receipt,
        "stale_index_tokens": stale_index_tokens(receipt),
        "terms_add_up": all(terms_add_up(candidate) for candidate in receipt.candidates if candidate.terms),
        "text": explain(receipt),
    }
    return msgspec.json.encode(report).decode()


# --- reconcile -------------------------------------------------------------------------------------------------------


def _against_metrics(receipts: list[Receipt], after: Path | None, before: Path | None) -> list[Comparison]:
    if after is None:
        return []
    return compare(receipts, _totals(after), _totals(before) if before is not None else None)


def _totals(page: Path) -> Mapping[str, float]:
    try:
        return totals_of_page(page.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise ValueError(f"{page} is no metrics page: {problem}") from problem


def _report(receipts: list[Receipt], comparisons: list[Comparison]) -> dict[str, Any]:
    reconciled = reconcile(receipts)
    stale = reconciled.stale_index_tokens
    return {
        "receipts": reconciled.receipts,
        "by_status": dict(sorted(Counter(receipt.status.value for receipt in receipts).items())),
        "compared": reconciled.compared,
        "claim_unknown": reconciled.claim_unknown,
        "actual_unknown": reconciled.actual_unknown,
        "claimed_tokens": reconciled.claimed_tokens,
        "actual_cached_tokens": reconciled.actual_tokens,
        "eligible_tokens": reconciled.eligible_tokens,
        "within_one_block": reconciled.within_one_block,
        "stale_index_tokens": {
            **msgspec.structs.asdict(distribution(stale)),
            "min": min(stale, default=None),
            "sum": sum(stale),
            "claimed_too_many": sum(difference > 0 for difference in stale),
            "exact": sum(difference == 0 for difference in stale),
            "claimed_too_few": sum(difference < 0 for difference in stale),
        },
        "gate_loss_tokens": _gate_losses(receipts),
        "manifest_digests": sorted({receipt.manifest_digest or "unknown" for receipt in receipts}),
        "metrics": comparisons,
        "verdict": _verdict(reconciled, comparisons),
    }


def _gate_losses(receipts: list[Receipt]) -> dict[str, int]:
    losses = [receipt.gate_loss_tokens for receipt in receipts if receipt.gate_loss_tokens is not None]
    return {gate: sum(getattr(loss, gate) for loss in losses) for gate in ("prefix", "route", "residency", "transfer")}


def _verdict(reconciled: Reconciled, comparisons: list[Comparison]) -> str:
    verdicts = {comparison.verdict for comparison in comparisons}
    if "fail" in verdicts:
        return "fail"
    return "unknown" if "unknown" in verdicts or reconciled.compared == 0 else "pass"


def _report_text(report: dict[str, Any]) -> str:
    stale = report["stale_index_tokens"]
    statuses = ", ".join(f"{status} {count}" for status, count in report["by_status"].items())
    lines = [
        f"receipts           {report['receipts']}" + (f" ({statuses})" if statuses else ""),
        f"compared           {report['compared']}; claim unknown {report['claim_unknown']},"
        f" actual unknown {report['actual_unknown']}",
        f"claimed tokens     {report['claimed_tokens']}",
        f"actual tokens      {report['actual_cached_tokens']}",
        f"eligible tokens    {report['eligible_tokens']}",
        f"within one block   {report['within_one_block']} of {report['compared']}",
        f"claimed - actual   min {_or_unknown(stale['min'])}, p50 {_or_unknown(stale['p50'])},"
        f" p95 {_or_unknown(stale['p95'])}, max {_or_unknown(stale['max'])}, sum {stale['sum']}"
        f" (count {stale['count']}: too many {stale['claimed_too_many']}, exact {stale['exact']},"
        f" too few {stale['claimed_too_few']})",
        "lost tokens        " + ", ".join(f"{gate} {tokens}" for gate, tokens in report["gate_loss_tokens"].items()),
        "manifest           " + (", ".join(report["manifest_digests"]) or "none"),
    ]
    for comparison in report["metrics"]:
        found = "missing" if comparison.metrics_total is None else f"{comparison.metrics_total:g}"
        lines.append(
            f"{comparison.verdict:<18} {comparison.metric}: receipts {comparison.receipts_total:g}, metrics {found}"
        )
    weak = report["verdict"] == "pass" and not report["metrics"]
    lines.append(f"verdict            {report['verdict']}{' (no metrics page to hold them against)' if weak else ''}")
    return "\n".join(lines)
