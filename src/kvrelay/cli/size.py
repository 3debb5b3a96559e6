"""`kvrelay size`: how much cache a trace asks for, and when fetching a prefix beats computing it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from kvrelay.cli import messages, size_sweep
from kvrelay.cli.messages import size as words

if TYPE_CHECKING:
    from kvrelay.core.sizing.breakeven import Link, Prefill
    from kvrelay.core.sizing.memory import MemoryVerdict
    from kvrelay.core.sizing.sweep import Advice
    from kvrelay.lab.report.paper import Section
    from kvrelay.lab.sizing.sizing import Sizing

app = typer.Typer(add_completion=False, rich_markup_mode=None)

ASSUMED_KV_BYTES_PER_TOKEN = 2 * 32 * 8 * 128 * 2  # keys and values; layers, KV heads, head size, bytes
DEFAULT_LINKS = ("rdma=12.5,0.05", "ethernet=1.25,0.5", "object store=0.25,20")
DEFAULT_RATES = (2_000.0, 8_000.0, 32_000.0)
EXAMPLES = (
    "Example: kvrelay size trace.jsonl.gz --tier gpu=40 --tier cpu=200 --html size.html; "
    "kvrelay size --live http://127.0.0.1:8001 --store valkey://127.0.0.1:6379/0"
)


@app.command(epilog=EXAMPLES)
def size(
    trace: Path | None = typer.Argument(None, help="A trace, or preset:NAME."),
    demo: bool = typer.Option(False, "--demo", help="Size for the bundled agent sessions."),
    kv_bytes_per_token: float | None = typer.Option(None, min=1, help="KV bytes of one token, over all layers."),
    layers: int | None = typer.Option(None, min=1, help="With --kv-heads and --head-dim: KV bytes from the geometry."),
    kv_heads: int | None = typer.Option(None, min=1, help="KV heads per layer."),
    head_dim: int | None = typer.Option(None, min=1, help="Size of a head."),
    kv_bits: int = typer.Option(16, min=1, max=64, help="Bits per KV element."),
    capacity_gb: str = typer.Option("", help="Sizes to list, such as 10,50,200; default: up to all that is useful."),
    tier: list[str] = typer.Option([], help="NAME=GB, nearest first; repeat it."),
    sweep: str = typer.Option("", help="Recommend one of these sizes of a tier in GB, such as 5,20,80; or auto."),
    near_gb: float = typer.Option(0.0, min=0, help="With --sweep: the tier in front of it, such as the GPU's cache."),
    sample: float = typer.Option(1.0, min=0.0001, max=1, help="Look at this share of the blocks (SHARDS)."),
    price_per_gb_month: float | None = typer.Option(None, min=0, help="Price of a GB for a month."),
    price_per_million_prefill_tokens: float | None = typer.Option(None, min=0, help="What computing them costs."),
    host_gb: float | None = typer.Option(None, min=0, help="Memory check: what the host has."),
    engine_gb: float | None = typer.Option(None, min=0, help="Memory check: what the engine needs of it."),
    buffer_gb: float | None = typer.Option(None, min=0, help="Memory check: kept free; else a tenth of the host."),
    cache_gb: float | None = typer.Option(None, min=0, help="Memory check: what the cache is to take."),
    link: list[str] = typer.Option([], help="Break-even: NAME=GBYTES_PER_S,LATENCY_MS; repeat it."),
    prefill_tokens_per_s: list[float] = typer.Option([], help="Break-even: a prefill rate; repeat it."),
    live: str | None = typer.Option(None, help="Break-even: take the rates that this gateway has learned (admin URL)."),
    admin_token_file: Path | None = typer.Option(None, help="The file with that gateway's admin token."),
    store: list[str] = typer.Option([], help="Break-even: measure this store now; repeat it."),
    html: Path | None = typer.Option(None, help="Write a page with tables and plots."),
    json: bool = typer.Option(False, "--json", help="Print one JSON object on stdout."),
) -> None:
    """Hit curve, knee, marginal gain, tiers, chunk sizes and reuse distances of a trace; break-even of fetching.

    Exit 1: the cache asked for does not fit the host's memory.
    """
    if trace is None and not demo and live is None and not store and cache_gb is None:
        messages.fail(words.nothing_to_size())
    bytes_per_token = _bytes_per_token(kv_bytes_per_token, layers, kv_heads, head_dim, kv_bits)
    verdict = _memory(host_gb, engine_gb, buffer_gb, cache_gb)
    links = _links(link, store)
    rates = _rates(prefill_tokens_per_s, live, admin_token_file)
    sizing: Sizing | None = None
    facts: tuple[tuple[str, str], ...] = (("KV bytes per token", f"{bytes_per_token:,.0f}"),)
    notes: tuple[str, ...] = (words.NOT_VALIDATED,)
    if trace is not None or demo:
        prices = _prices(price_per_gb_month, price_per_million_prefill_tokens)
        sizing, own_facts, own_notes = _size(trace, bytes_per_token, capacity_gb, tier, sample, links[0], prices)
        facts, notes = own_facts + facts, notes + own_notes
    advice = None if not sweep else size_sweep.advise(sweep, sizing, near_gb, links[0], rates)
    sections = _sections(sizing, links, rates, bytes_per_token, verdict)
    if advice is not None:
        sections.insert(0, size_sweep.section(advice, links[0], rates))
    if html is not None:
        _write(html, sections, facts, notes)
    if json:
        sys.stdout.write(_json(sizing, links, rates, bytes_per_token, verdict, notes, advice) + "\n")
    else:
        _print(sections, notes, html)
    if verdict is not None and not verdict.safe:
        messages.fail(words.memory_refused(), code=messages.VERDICT_FAIL)


# --- what was said -----------------------------------------------------------------------------------------------


def _bytes_per_token(
    given: float | None, layers: int | None, kv_heads: int | None, head_dim: int | None, kv_bits: int
) -> float:
    geometry = {"--layers": layers, "--kv-heads": kv_heads, "--head-dim": head_dim}
    missing = [name for name, value in geometry.items() if value is None]
    if given is not None:
        return given
    if layers is not None and kv_heads is not None and head_dim is not None:
        return 2 * layers * kv_heads * head_dim * kv_bits / 8
    if len(missing) < len(geometry):
        messages.fail(words.part_of_geometry([name for name in geometry if name not in missing], missing))
    sys.stderr.write(words.assumed_bytes(ASSUMED_KV_BYTES_PER_TOKEN) + "\n")
    return float(ASSUMED_KV_BYTES_PER_TOKEN)


def _memory(
    host_gb: float | None, engine_gb: float | None, buffer_gb: float | None, cache_gb: float | None
) -> MemoryVerdict | None:
    from kvrelay.core.sizing.memory import judge_memory

    if host_gb is None and engine_gb is None and buffer_gb is None and cache_gb is None:
        return None
    if host_gb is None:
        messages.fail(words.part_of_memory("--host-gb"))
    if engine_gb is None:
        messages.fail(words.part_of_memory("--engine-gb"))
    if cache_gb is None:
        messages.fail(words.part_of_memory("--cache-gb"))
    buffer = None if buffer_gb is None else buffer_gb * 1e9
    return judge_memory(
        host_bytes=host_gb * 1e9, engine_bytes=engine_gb * 1e9, asked_bytes=cache_gb * 1e9, buffer_bytes=buffer
    )


def _prices(gb_month: float | None, million_prefill_tokens: float | None) -> Any:
    from kvrelay.core.sizing.cost import Prices

    if gb_month is None and million_prefill_tokens is None:
        return None
    if gb_month is None or million_prefill_tokens is None:
        messages.fail(words.part_of_prices())
    return Prices(gb_month, million_prefill_tokens)


def _links(given: list[str], stores: list[str]) -> tuple[Link, ...]:
    from kvrelay.core.sizing.breakeven import Link

    found = [_measured(url) for url in stores]
    for text in given or (() if stores else DEFAULT_LINKS):
        name, _, figures = text.partition("=")
        try:
            gbytes_per_s, latency_ms = (float(part) for part in figures.split(","))
        except ValueError:
            gbytes_per_s, latency_ms = 0.0, 0.0
        if not name or not 0 < gbytes_per_s < 1e6 or not 0 <= latency_ms < 1e7:
            messages.fail(words.bad_link(text))
        found.append(Link(name, gbytes_per_s * 1e9, latency_ms / 1000))
    return tuple(found)


def _measured(url: str) -> Link:
    from kvrelay.edge.stores.config import StoreConfigError
    from kvrelay.edge.stores.store import StoreError
    from kvrelay.lab.sizing.live import measure_store

    try:
        return measure_store(url)
    except (StoreError, StoreConfigError, OSError) as problem:
        messages.fail(words.no_store(url, problem))


def _rates(given: list[float], live: str | None, token_file: Path | None) -> tuple[Prefill, ...]:
    from kvrelay.cli.admin_client import AdminClient, AdminUnavailable
    from kvrelay.core.sizing.breakeven import Prefill
    from kvrelay.lab.sizing.live import NotAGateway, learned_rates

    for rate in given:
        if not 0 < rate < 1e9:
            legal = "tokens per second, above 0"
            messages.fail(messages.bad_value("prefill_tokens_per_s", rate, legal, source="`--prefill-tokens-per-s`"))
    stated = tuple(Prefill(f"{rate:,.0f} tokens/s", rate) for rate in given)
    if live is None:
        return stated or tuple(Prefill(f"{rate:,.0f} tokens/s", rate) for rate in DEFAULT_RATES)
    client = AdminClient(live, token_file)
    try:
        learned = learned_rates(client.workers())
    except (AdminUnavailable, NotAGateway, OSError) as problem:
        messages.fail(messages.unusable_input(live, problem))
    if not learned:
        messages.fail(words.no_rates(live), code=messages.UNKNOWN)
    named = (
        Prefill(f"{rate.name}: {rate.tokens_per_s:,.0f} tokens/s", rate.tokens_per_s, rate.samples) for rate in learned
    )
    return (*named, *stated)


# --- sizing ------------------------------------------------------------------------------------------------------


def _size(
    path: Path | None,
    bytes_per_token: float,
    capacity_gb: str,
    tiers: list[str],
    sample: float,
    link: Link,
    prices: Any,
) -> tuple[Sizing, tuple[tuple[str, str], ...], tuple[str, ...]]:
    from kvrelay.cli.demo import load_trace
    from kvrelay.cli.simulate import _numbers
    from kvrelay.lab.sizing.distances import slow_note
    from kvrelay.lab.sizing.sizing import Wanted, size_trace

    file = load_trace(path, bundled="with `--demo`")
    trace = file.trace
    uses = sum(len(turn.block_ids) for session in trace.sessions for turn in session.turns)
    note = slow_note(int(uses * sample))
    if note is not None:
        sys.stderr.write(f"note: {note}\n")
    sizing = size_trace(
        trace,
        Wanted(
            bytes_per_token=bytes_per_token,
            capacities_gb=tuple(_numbers("--capacity-gb", capacity_gb, low=1e-6, high=1e9)) if capacity_gb else (),
            tiers_gb=tuple(map(_tier, tiers)),
            sample_rate=sample,
            bytes_per_s=link.bytes_per_s,
            latency_s=link.latency_s,
            prices=prices,
        ),
    )
    facts = (
        ("trace", f"{file.name}, sha256 {file.sha256}"),
        ("requests", f"{sizing.requests:,} of {sizing.input_tokens:,} prompt tokens"),
        ("block", f"{sizing.block_size_tokens} tokens, {sizing.distinct_blocks:,} different ones"),
        ("sample", "none, exact" if sample == 1 else f"{sample:g} of the blocks"),
    )
    return sizing, facts, (*trace.limitations(), *trace.notices)


def _tier(text: str) -> tuple[str, float]:
    name, _, amount = text.partition("=")
    try:
        gb = float(amount)
    except ValueError:
        gb = -1.0
    if not name or not 0 < gb < 1e9:
        messages.fail(words.bad_tier(text))
    return name, gb


# --- telling -----------------------------------------------------------------------------------------------------


def _sections(
    sizing: Sizing | None,
    links: tuple[Link, ...],
    rates: tuple[Prefill, ...],
    bytes_per_token: float,
    verdict: MemoryVerdict | None,
) -> list[Section]:
    from kvrelay.lab.report.paper import Section
    from kvrelay.lab.sizing import story

    sections = [] if sizing is None else story.sizing_sections(sizing)
    if verdict is not None:
        sections.append(Section("Memory of the host", story.memory_words(verdict)))
    return sections + story.breakeven_sections(links, rates, bytes_per_token=bytes_per_token)


def _print(sections: list[Section], notes: tuple[str, ...], html: Path | None) -> None:
    from kvrelay.lab.sizing import story

    for section in sections:
        sys.stdout.write(f"{section.title}\n{section.text}\n")
        if section.table is not None:
            sys.stdout.write(section.table.text() + "\n")
        for point in section.points:
            sys.stdout.write(f"- {point}\n")
        sys.stdout.write("\n")
    for line in (*notes, *story.LIMITS):
        sys.stderr.write(line + "\n")
    if html is not None:
        sys.stderr.write(words.page_written(html) + "\n")


def _write(html: Path, sections: list[Section], facts: tuple[tuple[str, str], ...], notes: tuple[str, ...]) -> None:
    from kvrelay.cli.simulate import _write
    from kvrelay.lab.report.paper import render_paper
    from kvrelay.lab.sizing import story

    _write(html, render_paper(story.paper(sections, facts=facts, notes=notes)))


def _json(
    sizing: Sizing | None,
    links: tuple[Link, ...],
    rates: tuple[Prefill, ...],
    bytes_per_token: float,
    verdict: MemoryVerdict | None,
    notes: tuple[str, ...],
    advice: Advice | None,
) -> str:
    from kvrelay.core.sizing.breakeven import breakeven_tokens, point
    from kvrelay.lab.sizing import story

    result: dict[str, Any] = {
        "label": story.LABEL,
        "bytes_per_token": bytes_per_token,
        "limits": [*story.LIMITS, *notes],
    }
    if sizing is not None:
        members = (
            "block_size_tokens requests input_tokens distinct_blocks span_s sample_rate knee steps tiers splits chunks "
            "skipped_chunks costs"
        )
        result |= {name: getattr(sizing, name) for name in members.split()}
        result["reuse_distances"] = [{"up_to_blocks": upper, "tokens": tokens} for upper, tokens in sizing.histogram]
        result["knee_rule"] = story.KNEE_RULE
    if advice is not None:
        result["sweep"] = msgspec.to_builtins(advice)
    if verdict is not None:
        result["memory"] = {"safe": verdict.safe, "most_bytes": verdict.most_bytes, **msgspec.structs.asdict(verdict)}
    result["breakeven"] = [
        {
            "link": link,
            "prefill": rate,
            "worth_fetching_from_tokens": breakeven_tokens(link, rate, bytes_per_token=bytes_per_token),
            "points": [
                {**msgspec.structs.asdict(found), "fetch": found.fetch}
                for tokens in story.PREFIX_TOKENS
                for found in (point(tokens, link, rate, bytes_per_token=bytes_per_token),)
            ],
        }
        for rate in rates
        for link in links
    ]
    return msgspec.json.encode(result).decode()
