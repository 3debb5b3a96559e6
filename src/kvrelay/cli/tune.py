"""`kvrelay tune`: which weights of `cache_load` keep an SLO or gates on one half of a trace, and on the other, too."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import typer

from kvrelay.cli import messages
from kvrelay.cli.demo import complain, load_trace, make_folder, policy_names, run_to_end
from kvrelay.cli.messages import tune as words
from kvrelay.cli.replay import load_gates

app = typer.Typer(add_completion=False, rich_markup_mode=None)

DEFAULT_OUT = Path("kvrelay-tune")


@app.command(epilog="Example: kvrelay tune --demo --slo-ttft-p95-ms 600 --weights 1,0.002,0.005,0.05 --weights 1,0,0,0")
def tune(
    trace: Path | None = typer.Argument(None, help="A trace in any known format, plain or .gz."),
    demo: bool = typer.Option(False, "--demo", help="Use the bundled agent sessions instead of a file."),
    weights: list[str] = typer.Option([], help="alpha,beta,gamma,delta; repeat it. Default: a built-in list."),
    slo_ttft_p95_ms: float = typer.Option(600.0, min=0.001, help="Largest p95 of the modelled time to first token."),
    gates: Path | None = typer.Option(None, help="Gates instead of the SLO; their candidate stands for each vector."),
    repeats: int = typer.Option(1, min=1, max=20, help="Arms per weight vector; gates need 3 for a pass."),
    workers: int = typer.Option(4, min=1, max=16, help="Mock workers, each its own process."),
    seed: int = typer.Option(1, help="Of prompts and halves; the same seed gives the same bytes."),
    out: Path = typer.Option(DEFAULT_OUT, help="Folder for the two runs, `training` and `held_out`."),
    json: bool = typer.Option(False, "--json", help="Print the result as one JSON object on stdout."),
) -> None:
    """Choose weights on one half of a trace's sessions, by a rule stated beforehand, and confirm them on the other.

    Exit 0: confirmed; 1: no vector passes, or the pick fails on the held-out half; 3: it could not be confirmed.
    """
    from kvrelay.cli.arm_progress import ArmProgress
    from kvrelay.lab.demo.settings import settings_for
    from kvrelay.lab.tune.sweep import DEFAULT_VECTORS, Plan, Slo, run_sweep

    if (trace is None) != demo:
        messages.fail(messages.tune_needs_one_trace())
    source = load_trace(trace, bundled="with `--demo`")
    vectors = tuple(weight_vector(text) for text in weights) or DEFAULT_VECTORS
    settings = settings_for(source.trace, workers=workers, repeats=repeats, policies=(), seed=seed)
    plan = Plan(vectors, Slo(slo_ttft_p95_ms), None if gates is None else _gates(gates))
    make_folder(out)
    with ArmProgress() as progress:
        sweep = run_to_end(run_sweep(source, settings, plan, out=out, watcher=progress))
    _finish(sweep, out, as_json=json)


def _gates(path: Path) -> Any:
    store = load_gates(path)
    policy_names(store.file.baseline, source=f"`baseline` in `{path}`")
    return store


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
    from kvrelay.lab.report.files import write_files
    from kvrelay.lab.tune.sweep import HELD_OUT
    from kvrelay.lab.tune.table import held_out_table, sweep_table, tune_summary

    if sweep.held_out is not None:
        write_files(sweep.held_out, out / HELD_OUT)
    if as_json:
        sys.stdout.write(msgspec.json.encode(tune_summary(sweep)).decode() + "\n")
    else:
        held_out = None if sweep.held_out is None else held_out_table(sweep).text()
        sys.stdout.write(words.story(sweep_table(sweep).text(), sweep.rule, sweep.pick, held_out, out))
    complain(sweep.measured)
    if sweep.pick is None:
        messages.fail(words.nothing_passes(), code=messages.VERDICT_FAIL)
    if sweep.confirmed is not True:
        verdict = sweep.held_out.ruling.verdict
        reasons = () if verdict is None else verdict.reasons
        failed = sweep.confirmed is False
        code = messages.VERDICT_FAIL if failed else messages.UNKNOWN
        messages.fail(words.not_confirmed(sweep.pick, reasons, failed=failed), code=code)
