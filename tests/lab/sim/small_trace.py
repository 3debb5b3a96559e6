"""A trace file of a few sessions that grow and share a beginning, in Mooncake rows."""

from __future__ import annotations

import json
import random
from pathlib import Path

BLOCK = 512


def write_small_trace(path: Path, *, sessions: int = 8, turns: int = 5, seed: int = 1) -> Path:
    chance = random.Random(seed)
    rows = []
    next_id = 3
    for session in range(sessions):
        blocks, at_ms = [0, 1, 2], 2_000.0 * session
        for _ in range(turns):
            blocks += range(next_id, next_id := next_id + chance.randrange(1, 5))
            tail = chance.randrange(1, BLOCK)
            rows.append((at_ms, session, len(blocks) * BLOCK + tail, [*blocks, next_id]))
            next_id += 1
            at_ms += chance.uniform(3_000, 40_000)
    lines = [
        {"timestamp": at, "session_id": f"s{own}", "input_length": tokens, "output_length": 20, "hash_ids": ids}
        for at, own, tokens, ids in sorted(rows)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
