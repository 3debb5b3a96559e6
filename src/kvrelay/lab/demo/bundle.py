"""Makes the bundled trace from the published one: `python -m kvrelay.lab.demo.bundle SOURCE DESTINATION`.

The rule, and nothing else, decides what is in the bundle; no session was picked by hand:
1. of every session, the requests of its first `WINDOW_S` seconds (sub-agents that start in it included);
2. a request above `MAX_CONTEXT_TOKENS` and everything after it in its session is left out;
3. sessions with fewer than `MIN_TURNS` requests left are dropped;
4. the first `MAX_SESSIONS` sessions in file order stay.
Members of a request are kept as published; `totals` goes, because it would no longer be true.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

WINDOW_S = 900
MAX_CONTEXT_TOKENS = 98_304
MIN_TURNS = 3
MAX_SESSIONS = 24
KEPT_MEMBERS = ("t", "type", "in", "out", "hash_ids", "api_time", "think_time")


def bundle(lines: list[bytes]) -> list[bytes]:
    sessions = [_shortened(json.loads(line)) for line in lines if line.strip()]
    kept = [session for session in sessions if _own_turns(session) >= MIN_TURNS][:MAX_SESSIONS]
    return [json.dumps(session, separators=(",", ":")).encode() for session in kept]


def _shortened(session: dict[str, Any]) -> dict[str, Any]:
    entries: list[dict[str, Any]] = []
    open_to_more = True
    for entry in session["requests"]:
        if entry["t"] >= WINDOW_S:
            break
        if "requests" in entry:
            entries += _sub_agent(entry)
            continue
        open_to_more = open_to_more and _fits(entry)
        if open_to_more:
            entries.append(_members(entry))
    named = {name: session[name] for name in ("id", "block_size", "hash_id_scope")}
    return {**named, "requests": entries}


def _sub_agent(entry: dict[str, Any]) -> list[dict[str, Any]]:
    requests = []
    for request in entry["requests"]:
        if entry["t"] + request["t"] >= WINDOW_S or not _fits(request):
            break
        requests.append(_members(request))
    if not requests:
        return []
    return [{"t": entry["t"], "type": entry["type"], "agent_id": entry["agent_id"], "requests": requests}]


def _fits(request: dict[str, Any]) -> bool:
    return bool(request["in"] + request["out"] <= MAX_CONTEXT_TOKENS)


def _members(request: dict[str, Any]) -> dict[str, Any]:
    return {name: request[name] for name in KEPT_MEMBERS if name in request}


def _own_turns(session: dict[str, Any]) -> int:
    return sum(1 for entry in session["requests"] if "requests" not in entry)


def main(source: str, destination: str) -> None:
    packed = Path(source).read_bytes()
    lines = bundle(gzip.decompress(packed).splitlines())
    # No name and no time in the gzip header: the same input gives the same bytes.
    Path(destination).write_bytes(gzip.compress(b"\n".join(lines) + b"\n", compresslevel=9, mtime=0))
    sys.stderr.write(f"{len(lines)} sessions written to {destination}\n")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m kvrelay.lab.demo.bundle SESSIONS.jsonl.gz BUNDLE.jsonl.gz")
    main(*sys.argv[1:])
