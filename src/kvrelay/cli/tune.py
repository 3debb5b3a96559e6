"""`kvrelay tune`: which weights of `cache_load` meet an SLO on a trace, by a rule stated beforehand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import typer

from kvrelay.cli import messages
from kvrelay.cli.demo import complain, load_trace, make_folder, run_to_end

app = typer.Typer(add_completion=False, rich_markup_mode=None)

DEFAULT_OUT = Path("kvrelay-tune")


@app.command(epilog="Example: kvrelay tune --demo --slo-ttft-p95-ms 600 --weights 1,0.002,0.005,0.05 --weights 1,0,0,0")
def tune(
    trace: Path | None = typer.Argument(None, help="Agent sessions or Mooncake rows, plain or .gz."),
    demo: bool = typer.Option(False, "--demo", help="Use the bundled agent sessions instead of a file."),
    weights: list[str] = typer.Option([], help="alpha,beta,gamma,delta; repeat it. Default: a built-in list."),
    slo_ttft_p95_ms: float = typer.Option(600.0, min=0.001, help="Largest p95 of the modelled time to first token."),
    repeats: int = typer.Option(1, min=1, max=20, help="Arms per weight vector."),
    workers: int = typer.Option(4, min=1, max=16, help="Mock workers, each its own process."),
    seed: int = typer.Option(1, help="Of the prompts; the same seed gives the same bytes."),
    out: Path = typer.Option(DEFAULT_OUT, help="Folder for manifest, receipts and samples."),
    json: bool = typer.Option(False, "--json", help="Print the result as one JSON object on stdout."),
) -> None:
    """Replay a trace once per weight vector on mock workers and pick by a rule that the manifest states beforehand.

    Exit 0: a vector was picked; 1: none meets the SLO.
    """
    from kvrelay.cli.arm_progress import ArmProgress
    from kvrelay.lab.demo.settings import settings_for
    from kvrelay.lab.tune.sweep import DEFAULT_VECTORS, Slo, run_sweep

    if (trace is None) != demo:
        messages.fail(messages.tune_needs_one_trace())
    source = load_trace(trace, bundled="with `--demo`")
    vectors = [weight_vector(text) for text in weights] or DEFAULT_VECTORS
    settings = settings_for(source.trace, workers=workers, repeats=repeats, policies=("cache_load",), seed=seed)
    make_folder(out)
    with ArmProgress() as progress:
        sweep = run_to_end(run_sweep(source, settings, vectors, Slo(slo_ttft_p95_ms), out=out, watcher=progress))
    _finish(sweep, out, as_json=json)


def weight_vector(text: str) -> Any:
    from kvrelay.lab.arms.contender import Weights

    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if len(values) != len(Weights.__struct_fields__) or not all(0 <= value <= 1e6 for value in values):
        legal = "four numbers alpha,beta,gamma,delta, each from 0 to 1e6, such as 1,0.002,0.005,0.05"
        messages.fail(messages.bad_value("weights", text, legal, source="`--weights`"))
    return Weights(*values)


def _finish(sweep: Any, out: Path, *, as_json: bool) -> None:
    from kvrelay.lab.tune.table import sweep_table, tune_summary

    if as_json:
        sys.stdout.write(msgspec.json.encode(tune_summary(sweep)).decode() + "\n")
    else:
        sys.stdout.write(messages.tune_story(sweep_table(sweep).text(), sweep.slo.rule(), sweep.pick, out))
    complain(sweep.measured)
    if sweep.pick is None:
        messages.fail(messages.no_vector_passes(sweep.slo.ttft_p95_ms), code=messages.VERDICT_FAIL)
