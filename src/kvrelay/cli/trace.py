"""`kvrelay trace`: look into traces, convert them, cut them down, and make prompts of them."""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from kvrelay.cli import messages
from kvrelay.cli.command_group import CommandGroup
from kvrelay.cli.messages import trace as words
from kvrelay.cli.reporting import print_json

if TYPE_CHECKING:
    from kvrelay.lab.replay.trace_file import TraceFile

app = typer.Typer(
    cls=CommandGroup,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Look into traces, convert them, cut them down, make prompts of them.",
)

STDOUT = Path("-")
KEY_BYTES = 32

TraceArgument = Annotated[Path, typer.Argument(metavar="TRACE", help="A file (plain or .gz), or `preset:NAME`.")]
FormatOption = Annotated[str | None, typer.Option("--format", help="Its format. Default: by its first line.")]
BlockSizeOption = Annotated[
    int | None, typer.Option("--block-size", min=1, max=4096, help="Tokens per block id, where the file does not say.")
]
RowsOption = Annotated[
    Literal["cumulative", "delta"] | None,
    typer.Option("--rows", help="Whether rows of a session hold the whole context or only new tokens."),
]
TimeUnitOption = Annotated[Literal["ms", "s"] | None, typer.Option("--time-unit", help="Of timestamps.")]
KeyOption = Annotated[
    Path | None,
    typer.Option("--key-file", help="Key of the fingerprints of request logs. Default: a new one, then forgotten."),
]
TokenizerOption = Annotated[
    Path | None, typer.Option("--tokenizer", help="`tokenizer.json` for request logs. Default: 4 bytes are one token.")
]
OutOption = Annotated[Path, typer.Option("--out", "-o", help="File to write (.gz is packed), `-` for stdout.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]


@app.command(epilog="Example: kvrelay trace inspect mooncake.jsonl.gz --html trace.html")
def inspect(
    trace: TraceArgument,
    kind: FormatOption = None,
    block_size: BlockSizeOption = None,
    rows: RowsOption = None,
    time_unit: TimeUnitOption = None,
    key_file: KeyOption = None,
    tokenizer: TokenizerOption = None,
    html: Annotated[Path | None, typer.Option(help="Write the facts with plots as one HTML file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show counts, lengths, sharing and the hits of an endless cache."""
    from kvrelay.core.traces.facts import examine

    source = _load(trace, kind, block_size, rows, time_unit, key_file, tokenizer)
    examined = examine(source.trace)
    if html is not None:
        from kvrelay.lab.traces.page import trace_page

        _write_text(html, trace_page(source, examined))
        messages.say(words.written(html, "the facts with plots"))
    if as_json:
        facts = {"name": source.name, "format": source.format, "sha256": source.sha256}
        print_json(facts | msgspec.to_builtins(examined.facts))
    else:
        sys.stdout.write(words.facts_in_words(source.name, source.format, examined.facts))


@app.command(epilog="Example: kvrelay trace convert sessions.jsonl --to mooncake --out rows.jsonl")
def convert(
    trace: TraceArgument,
    to: Annotated[str, typer.Option(help="kvrelay, mooncake, aiperf, weka, bailian, azure or burstgpt.")] = "kvrelay",
    out: OutOption = STDOUT,
    kind: FormatOption = None,
    block_size: BlockSizeOption = None,
    rows: RowsOption = None,
    time_unit: TimeUnitOption = None,
    key_file: KeyOption = None,
    tokenizer: TokenizerOption = None,
    derive_sessions: Annotated[
        bool, typer.Option("--derive-sessions", help="Group rows without a session by the blocks that they continue.")
    ] = False,
) -> None:
    """Read any format and write another.

    What the new one cannot say is named on stderr.
    """
    from kvrelay.core.traces.derived_sessions import with_derived_sessions

    source = _load(trace, kind, block_size, rows, time_unit, key_file, tokenizer)
    wanted = with_derived_sessions(source.trace) if derive_sessions else source.trace
    _export(wanted, to, out)


@app.command(
    epilog="Example: kvrelay trace filter agents.jsonl --max-model-len 32768 --sample 0.1 --seed 7 -o cut.jsonl"
)
def filter(
    trace: TraceArgument,
    out: OutOption = STDOUT,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Input + output of a turn; a longer one goes with its followers.")
    ] = None,
    sample: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Share of sessions to keep whole.")] = None,
    max_sessions: Annotated[int | None, typer.Option(min=1, help="The first so many, or drawn with `--seed`.")] = None,
    max_requests: Annotated[int | None, typer.Option(min=1, help="After everything else, in order.")] = None,
    max_turns: Annotated[int | None, typer.Option(min=1, help="The head of each session.")] = None,
    min_turns: Annotated[int, typer.Option(min=1, help="Sessions of fewer turns are left out.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Of the draw; the same seed keeps the same sessions.")] = None,
    to: Annotated[str, typer.Option(help="Format to write.")] = "kvrelay",
    kind: FormatOption = None,
    block_size: BlockSizeOption = None,
    rows: RowsOption = None,
    time_unit: TimeUnitOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep whole sessions that fit; count what was excluded.

    Of a session with a turn that does not fit, the head is kept. What is left is labelled `filtered synthetic subset`.
    """
    from kvrelay.core.traces.cut import CutRule, cut
    from kvrelay.core.traces.reuse import reuse_of

    source = _load(trace, kind, block_size, rows, time_unit, None, None)
    rule = CutRule(max_model_len, max_turns, min_turns, max_sessions, seed, max_requests, sample)
    result = cut(source.trace, rule)
    before, after = reuse_of(source.trace), reuse_of(result.trace)
    if as_json and out == STDOUT:
        messages.fail(messages.bad_value("--out", "-", "a file, as `--json` takes stdout", source="the command line"))
    _export(result.trace, to, out)
    if as_json:
        counts = msgspec.to_builtins(result.counts)
        hits = {"before": before.token_hit, "after": after.token_hit, "tail_rule": after.tail_rule}
        rules = {"rule": msgspec.to_builtins(rule), "sha256": source.sha256}
        print_json({"label": result.trace.label, **rules, "counts": counts, "endless_cache_token_hit": hits})
    else:
        messages.say(words.filtered(result.counts, result.trace.label, before, after))


@app.command(epilog="Example: kvrelay trace synth preset:rag --as text --seed 7 --out prompts.jsonl")
def synth(
    trace: TraceArgument,
    out: OutOption = STDOUT,
    form: Annotated[
        Literal["tokens", "text", "chat"], typer.Option("--as", help="Token ids, words, or chat messages.")
    ] = "tokens",
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.")] = 1,
    block_tokens: Annotated[
        int | None, typer.Option(min=4, help="Tokens that stand for one block. Default: the trace's block size.")
    ] = None,
    kind: FormatOption = None,
    block_size: BlockSizeOption = None,
    rows: RowsOption = None,
    time_unit: TimeUnitOption = None,
) -> None:
    """Make prompts whose blocks are equal where ids are.

    Exactly there: two blocks are equal if and only if their ids are. Nothing comes from anybody's text.
    """
    from kvrelay.core.traces.plan import Scale, make_plan
    from kvrelay.core.traces.prompts import prompt_rows

    source = _load(trace, kind, block_size, rows, time_unit, None, None)
    size = block_tokens or source.trace.block_size_tokens or 16
    plan = make_plan(source.trace, Scale(size), seed=seed)
    _write_lines(out, prompt_rows(plan, form))
    messages.say(words.written(out, f"{plan.requests:,} prompts of {plan.prompt_tokens:,} tokens, seed {seed}"))


def _load(
    path: Path,
    kind: str | None,
    block_size: int | None,
    rows: Any,
    time_unit: Any,
    key_file: Path | None,
    tokenizer: Path | None,
) -> TraceFile:
    """Ends the process with a message when the file is no trace, or does not say all that is needed."""
    from kvrelay.core.traces.formats.options import ImportOptions
    from kvrelay.core.traces.formats.registry import FORMATS
    from kvrelay.core.traces.trace import NotTold, TraceError
    from kvrelay.lab.replay.trace_file import read_trace

    if kind is not None and kind not in FORMATS:
        messages.fail(messages.unknown_name("format", kind, FORMATS, source="`--format`"))
    options = ImportOptions(block_size, rows, time_unit, key=_key(key_file), tokenize=_tokenize(tokenizer))
    try:
        source = read_trace(path, options, kind=kind)
    except OSError as problem:
        messages.fail(words.unreadable(path, problem.strerror or str(problem)))
    except NotTold as problem:
        messages.fail(words.not_told(path, problem.line, problem.found, problem.legal, problem.option))
    except TraceError as problem:
        messages.fail(messages.bad_trace(path, problem.line, problem.found, problem.legal))
    if source.trace.notices:
        messages.say(words.notices(source.trace.notices))
    return source


def _key(path: Path | None) -> bytes:
    """At most 64 bytes, as the hash takes no longer key; a longer file is hashed first."""
    if path is None:
        return secrets.token_bytes(KEY_BYTES)
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError as problem:
        messages.fail(messages.unusable_input("the key file", problem))


def _tokenize(path: Path | None) -> Any:
    if path is None:
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        messages.fail(words.NEEDS_TOKENS)
    try:
        loaded = Tokenizer.from_file(str(path))
    except Exception as problem:  # the library raises bare exceptions
        messages.fail(messages.unusable_input(f"the tokenizer `{path}`", problem))
    return lambda text: loaded.encode(text, add_special_tokens=False).ids


def _export(trace: Any, to: str, out: Path) -> None:
    from kvrelay.core.traces.formats.options import CannotExpress
    from kvrelay.core.traces.formats.registry import FORMATS

    writers = {name: known.write for name, known in FORMATS.items() if known.write is not None}
    if to not in writers:
        messages.fail(messages.unknown_name("format", to, writers, source="`--to`"))
    try:
        exported = writers[to](trace)
    except CannotExpress as problem:
        messages.fail(words.cannot_express(to, str(problem)))
    _write_lines(out, exported.lines)
    if exported.notices:
        messages.say(words.notices(exported.notices))
    messages.say(words.written(out, words.requests_in(len(trace.sessions), trace.requests, to)))


def _write_lines(out: Path, lines: Iterable[bytes]) -> None:
    from kvrelay.lab.traces.write_trace import write_lines

    try:
        write_lines(out, lines)
    except BrokenPipeError:  # the reader has had enough, as `head` does; nothing may be flushed into the pipe any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(messages.OK) from None
    except OSError as problem:
        messages.fail(words.cannot_write(out, problem.strerror or str(problem)))


def _write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as problem:
        messages.fail(words.cannot_write(path, problem.strerror or str(problem)))
