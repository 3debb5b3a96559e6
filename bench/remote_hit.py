"""A remote hit of 1,755 tokens between real vLLM workers: ours through a Valkey, LMCache's through its own server.

    KVRELAY_LMCACHE_PYTHON=.../bin/python python -m bench.remote_hit        about four minutes; leave the machine alone

Both pairs are up at once and take turns, prompt by prompt: A computes and saves, B gets it from the store, then from
its own cache. LMCache wants packages that vLLM on a CPU does without, so it is not among this project's: the variable
names an interpreter that has it beside the engine (docs/evidence/kv-between-two-vllm.md says how to make one). On a CPU
it works with a server of its own only; its in-process connector has no device there. Exit status 1: ours is slower by
more than a tenth.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from tests.real.engine import MODEL_NAME, Engine, VllmWorker, installed
from tests.real.kv_pair import prompt_of
from tests.real.kv_worker import KvWorker
from tests.real.store_servers import Server, answers_http, valkey
from tests.real.store_servers import running as running_servers

from bench.rig.engines import pair, running
from kvrelay.edge.system.ports import spare_port

PROMPT_TOKENS, LMCACHE_CHUNK_TOKENS = 1_755, 256
ROUNDS, WARM_UP = 6, 1
SAVED_WITHIN_S = 1.5  # a prompt's chunks
NOISE = 1.1
KINDS = ("cold", "remote", "local")


class LmcacheWorker(VllmWorker):
    """As its manual has it, with the transfer that works without a GPU."""

    def __init__(self, engine: Engine, name: str, *, cpu: int, folder: Path, server_port: int) -> None:
        super().__init__(engine, name, port=spare_port(), cpu=cpu, folder=folder)
        self._server_port = server_port

    def more_arguments(self) -> tuple[str, ...]:
        extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self._server_port}
        transfer = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        return "--kv-transfer-config", json.dumps(transfer)

    def _environment(self) -> dict[str, str]:
        return super()._environment() | {"PYTHONHASHSEED": "0"}  # the chunks' names are Python's hashes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.remote_hit")
    parser.add_argument("--chunk-tokens", type=int, default=LMCACHE_CHUNK_TOKENS, help="ours; LMCache has its default")
    chunk_tokens = parser.parse_args().chunk_tokens
    python = Path(os.environ["KVRELAY_LMCACHE_PYTHON"])
    engine = installed("medium")
    with tempfile.TemporaryDirectory(prefix="remote-hit-") as place:
        folder = Path(place)
        store, their_store = valkey(folder / "valkey"), _lmcache_server(python, folder)
        with running_servers([store, their_store]):
            ours = pair(lambda name, cpu: _ours(engine, name, cpu, folder, store.port, chunk_tokens))
            beside = Engine(python, engine.model)
            theirs = pair(
                lambda name, cpu: LmcacheWorker(
                    beside, f"lmcache-{name}", cpu=cpu, folder=folder, server_port=their_store.port
                )
            )
            with running([*ours, *theirs]):
                for worker in ours:
                    worker.wait_until_sharing()
                seconds = _take_turns({"kvrelay": (ours, chunk_tokens), "LMCache": (theirs, LMCACHE_CHUNK_TOKENS)})
    return _tell(seconds)


def _ours(engine: Engine, name: str, cpu: int, folder: Path, store_port: int, chunk_tokens: int) -> KvWorker:
    tier = {"url": f"valkey://127.0.0.1:{store_port}/0", "promote": "never"}
    return KvWorker(
        engine,
        f"kvrelay-{name}",
        port=spare_port(),
        report_port=spare_port(),
        cpu=cpu,
        folder=folder,
        connector={
            "store": {"tiers": [tier], "deadline_ms": 5000, "break_even": False},
            "chunk_tokens": chunk_tokens,
            "digest_cache": str(folder / "digests.json"),
            "lookup_deadline_ms": 5000,
        },
        adapters={},
        environment={},
    )


def _lmcache_server(python: Path, folder: Path) -> Server:
    port, http = spare_port(), spare_port()
    command = [
        str(python.with_name("lmcache")), "server", "--host", "127.0.0.1", "--port", str(port),
        "--http-host", "127.0.0.1", "--http-port", str(http), "--chunk-size", str(LMCACHE_CHUNK_TOKENS),
        "--l1-size-gb", "1", "--eviction-policy", "LRU", "--disable-observability",
        "--supported-transfer-mode", "engine_driven",
    ]  # fmt: skip
    return Server(command, port=port, log=folder / "lmcache-server.log", up=lambda _: answers_http(http))


def _take_turns(pairs: Mapping[str, tuple[Sequence[VllmWorker], int]]) -> dict[str, dict[str, list[float]]]:
    """Seconds by system and kind, of each system's A and B and the size of its chunks. What came from where is the
    engine's own count."""
    taken: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in KINDS} for name in pairs}
    for turn in range(WARM_UP + ROUNDS):
        prompt = prompt_of(PROMPT_TOKENS, seed=1_000 + turn)
        for name, ((a, b), chunk_tokens) in pairs.items():
            cold_s, computed = first_token(a, prompt)
            time.sleep(SAVED_WITHIN_S)
            remote_s, cached = first_token(b, prompt)
            local_s, _ = first_token(b, prompt)
            whole_chunks = PROMPT_TOKENS // chunk_tokens * chunk_tokens
            if (computed, cached) != (0, whole_chunks):
                raise SystemExit(f"{name}: {computed} tokens cached on A, {cached} on B; 0 and {whole_chunks} were due")
            print(f"{name} {turn}: cold {cold_s:.3f}, remote {remote_s:.3f}, local {local_s:.3f} s", file=sys.stderr)
            if turn >= WARM_UP:
                for kind, seconds in zip(KINDS, (cold_s, remote_s, local_s), strict=True):
                    taken[name][kind].append(seconds)
    return taken


def first_token(worker: VllmWorker, prompt: list[int]) -> tuple[float, int]:
    """Seconds until a completion of one token is there, and how many tokens were not computed."""
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    request = urllib.request.Request(
        f"{worker.url}/v1/completions", msgspec.json.encode(body), {"content-type": "application/json"}
    )
    began_s = time.monotonic()
    with urllib.request.urlopen(request, timeout=120) as response:
        usage = msgspec.json.decode(response.read())["usage"]
    return time.monotonic() - began_s, (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _tell(seconds: dict[str, dict[str, list[float]]]) -> int:
    print(f"{PROMPT_TOKENS} tokens, {ROUNDS} prompts each, ms: least / median")
    for name, kinds in seconds.items():
        shown = [f"{kind} {min(s) * 1000:.0f} / {statistics.median(s) * 1000:.0f}" for kind, s in kinds.items()]
        print(f"{name}: {', '.join(shown)}")
    ours, theirs = (statistics.median(seconds[name]["remote"]) for name in ("kvrelay", "LMCache"))
    return int(ours > NOISE * theirs)


if __name__ == "__main__":
    sys.exit(main())
