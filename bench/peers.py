"""The gateway beside its peers: the same fixed-answer workers, the same requests, the same core, in one run.

Every contender runs all the time, pinned to one core; they are driven one after the other, in rounds whose order
rotates, so that what else the machine does falls on all of them. A figure is the median of its rounds. What is compared
is CPU time per unit: it does not depend on how busy the other core is, and the quotient does not depend on the machine.

Streams run at two paces. As fast as it goes, several chunks come with every read: the throughput of the relay. Every
4 ms, each chunk is a wake-up of its own, and what the kernel charges for that is the larger part for everybody.

Ours runs as a user would run it for this traffic: cache_load, a tokenizer of its own with everything on (receipts to a
file, metrics, health probes, deadlines). Peers run with their prefix-aware policy, and once with round robin.
Peers are not dependencies: `pip install smg` to have it in the table; what is missing is named.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import statistics
import sys
import tempfile
import urllib.error
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from msgspec import Struct

from bench.figure import Figure
from bench.gateway import CONNECTIONS, PATH, drive_all, get_json, wait_routable
from bench.rig.load import Load, post
from bench.rig.processes import Pinned, cores, launched, pinned
from kvrelay.edge.system.ports import spare_port

ROUNDS = 5
LIMIT_RATIO = 0.75
DISTINCT = 256  # prompts, sharing 16 heads; all of them are sent once before anything is measured
WORKLOADS = {"1 KB": (1_000, 3_000), "64 KB": (64_000, 600)}  # bytes of text, requests per round
STREAMS, STREAM_CHUNKS = 64, 400
PACES = {"as fast as it goes": 0.0, "every 4 ms": 4.0}  # of a worker's chunks; the first one has the limit
OURS = "kvrelay cache_load"
BARE = "bare byte relay"


class Contender(Struct, frozen=True):
    """Somebody who stands between client and workers."""

    name: str
    process: Pinned
    url: str
    routes_by_prefix: bool = False


class Cost(Struct, frozen=True):
    """One round of one contender."""

    cpu_us: float  # per request, or per streamed chunk
    per_s: float
    p50_ms: float
    p99_ms: float


def run() -> list[Figure]:
    gateway_core, other_core = cores()
    kept = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {other_core})
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            figures: list[Figure] = []
            for pace, chunk_ms in PACES.items():
                with _table(folder, chunk_ms, gateway_core, other_core) as (worker, contenders):
                    if not figures:
                        for label, (size, requests) in WORKLOADS.items():
                            figures += _compared(f"{label} text", "request", contenders, worker, _texts(size), requests)
                    figures += _compared(f"stream {pace}", "chunk", contenders, worker, [_stream()], STREAMS)
                    memory = [
                        Figure(f"resident memory, {each.name}", each.process.rss_mb(), "MB") for each in contenders
                    ]
            return figures + memory
    finally:
        os.sched_setaffinity(0, kept)


@contextmanager
def _table(folder: Path, chunk_ms: float, gateway_core: int, other_core: int) -> Iterator[tuple[str, list[Contender]]]:
    """The workers, and everybody who stands before them."""
    with ExitStack() as stack:
        arguments = ["-m", "bench.rig.upstream", "--stream-chunks", str(STREAM_CHUNKS), "--chunk-ms", str(chunk_ms)]
        workers = stack.enter_context(pinned(arguments, core=other_core)).ready
        yield workers[0], _contenders(stack, workers, folder, gateway_core)


def _contenders(stack: ExitStack, workers: Sequence[str], folder: Path, core: int) -> list[Contender]:
    bare = stack.enter_context(pinned(["-m", "bench.rig.bare_relay", workers[0]], core=core))
    ours = stack.enter_context(pinned(_serve(workers, folder), core=core))
    wait_routable(ours.ready["admin_url"], len(workers))
    found = [Contender(BARE, bare, bare.ready["url"]), Contender(OURS, ours, ours.ready["url"], routes_by_prefix=True)]
    for policy, by_prefix in (("cache_aware", True), ("round_robin", False)):
        if importlib.util.find_spec("smg") is None:
            print("smg is not installed here (pip install smg): the table has no row for it", file=sys.stderr)
            break
        url, process = stack.enter_context(_smg(workers, policy, core))
        found.append(Contender(f"smg {policy}", process, url, routes_by_prefix=by_prefix))
    return found


def _compared(
    title: str,
    unit: str,
    contenders: Sequence[Contender],
    worker: str,
    payloads: Sequence[bytes],
    count: int,
) -> list[Figure]:
    """Rounds over all contenders in rotating order; the first round warms up and is dropped."""
    connections = STREAMS if unit == "chunk" else CONNECTIONS
    rounds: dict[str, list[Cost]] = {each.name: [] for each in contenders}
    straight: list[Load] = []
    for number in range(ROUNDS + 1):
        at = number % len(contenders)
        for each in (*contenders[at:], *contenders[:at]):
            cost = _round(each, _cycle(payloads, max(count, len(payloads))), connections, unit)
            if number:
                rounds[each.name].append(cost)
        straight.append(drive_all(worker, _cycle(payloads, count), connections))
    return _figures(title, unit, contenders, rounds, straight)


def _round(contender: Contender, payloads: Iterator[bytes], connections: int, unit: str) -> Cost:
    began = contender.process.cpu_s()
    load = drive_all(contender.url, payloads, connections)
    cpu_s = contender.process.cpu_s() - began
    units = load.chunks if unit == "chunk" else load.requests
    return Cost(cpu_s / units * 1e6, units / load.wall_s, load.percentile_ms(50), load.percentile_ms(99))


def _figures(
    title: str, unit: str, contenders: Sequence[Contender], rounds: dict[str, list[Cost]], straight: Sequence[Load]
) -> list[Figure]:
    median = {name: statistics.median(cost.cpu_us for cost in costs) for name, costs in rounds.items()}
    figures: list[Figure] = []
    for each in contenders:
        costs = rounds[each.name]
        figures.append(Figure(f"{title}: CPU per {unit}, {each.name}", median[each.name], "us"))
        figures.append(Figure("  rate", statistics.median(cost.per_s for cost in costs), "1/s"))
        if unit == "request":
            for name, of in (("p50", lambda cost: cost.p50_ms), ("p99", lambda cost: cost.p99_ms)):
                least = statistics.median(load.percentile_ms(int(name[1:])) for load in straight)
                figures.append(
                    Figure(f"  {name}", statistics.median(map(of, costs)), "ms", None, least, "without gateway")
                )
    peers = [each.name for each in contenders if each.routes_by_prefix and each.name != OURS]
    if peers:
        best = min(peers, key=median.__getitem__)
        limit = LIMIT_RATIO if title != f"stream {tuple(PACES)[1]}" else None
        figures.append(Figure(f"{title}: ours / {best}, CPU per {unit}", median[OURS] / median[best], "x", limit))
    return figures


# --- what is sent ----------------------------------------------------------------------------------------------------


def _texts(size: int) -> list[bytes]:
    """Prompts of `size` bytes: half of each is one of 16 shared heads, the rest its own."""
    chance = random.Random(size)
    heads = [_words(chance, size // 2) for _ in range(16)]
    prompts = [heads[number % 16] + _words(chance, size - size // 2) for number in range(DISTINCT)]
    return [post(PATH, _body({"prompt": prompt, "max_tokens": 20})) for prompt in prompts]


def _stream() -> bytes:
    return post(PATH, _body({"prompt": "tell me a story", "max_tokens": STREAM_CHUNKS, "stream": True}))


def _body(members: dict[str, object]) -> bytes:
    return json.dumps({"model": "m", **members}, separators=(",", ":")).encode()


def _words(chance: random.Random, size: int) -> str:
    text = ""
    while len(text) < size:
        text += " ".join(chance.choice(VOCABULARY) for _ in range(200)) + " "
    return text[:size]


def _cycle(payloads: Sequence[bytes], count: int) -> Iterator[bytes]:
    return (payloads[number % len(payloads)] for number in range(count))


# --- who is driven ---------------------------------------------------------------------------------------------------


def _serve(workers: Sequence[str], folder: Path) -> list[str]:
    tokenizer = _tokenizer(folder)
    lines = [
        '[gateway]\npolicy = "cache_load"\nport = 0\nadmin_port = 0',
        f"[tokens]\ntokenizer = {json.dumps(str(tokenizer))}",
        f"[receipts]\npath = {json.dumps(str(folder / 'receipts.jsonl'))}",
        *(f"[[workers]]\nurl = {json.dumps(url)}" for url in workers),
    ]
    file = folder / "kvrelay.toml"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return ["-m", "kvrelay.cli.main", "serve", "-c", str(file), "--json"]


def _tokenizer(folder: Path) -> Path:
    """Byte-level BPE over the words that are sent, with one special token to cut at."""
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=4_000, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([" ".join(VOCABULARY)], trainer)
    file = folder / "tokenizer.json"
    made.save(str(file))
    return file


@contextmanager
def _smg(workers: Sequence[str], policy: str, core: int) -> Iterator[tuple[str, Pinned]]:
    port, metrics_port = spare_port(), spare_port()
    arguments = ["-m", "smg", "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", policy]
    arguments += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port), "--log-level", "error"]
    arguments += ["--model-path", "m", "--disable-tokenizer-autoload", "--worker-urls", *workers]
    url = f"http://127.0.0.1:{port}"
    with launched(arguments, core=core, is_ready=lambda: _answers(f"{url}/v1/models")) as process:
        yield url, process


def _answers(url: str) -> bool:
    try:
        return bool(get_json(url)["data"])
    except (urllib.error.URLError, ConnectionError, KeyError, ValueError):
        return False


VOCABULARY = [
    f"{a}{b}" for a in ("ka", "lo", "mi", "ne", "pu", "ra", "se", "to") for b in ("ren", "sil", "tam", "vor", "x")
]
