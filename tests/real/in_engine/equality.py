"""Write: compute prompts and save their KV. Read, in another process: load it and compare with a local hit.

equality.py write|read MODEL STORE PORT DTYPE COUNT
"""

from __future__ import annotations

import random
import sys
from typing import Any

from engine import CHUNK_TOKENS, InProcess, say


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """To the bit."""
    return bool(one["exact"] == other["exact"] and one["tokens"] == other["tokens"])


def prompts(count: int) -> list[list[int]]:
    """Of lengths of which a whole number of chunks is reused, loaded or local, so that the work is split alike."""
    chance = random.Random(7)
    lengths = [(1 + i % 2) * CHUNK_TOKENS + 1 + i % 30 for i in range(count)]
    return [[chance.randrange(256) for _ in range(length)] for length in lengths]


def main(role: str, model: str, store: str, port: str, dtype: str, count: str) -> None:
    engine, asked = InProcess(model, store, int(port), dtype=dtype), prompts(int(count))
    if role == "write":
        for prompt in asked:
            engine.generate(prompt)
        engine.wait_until_saved(sum(len(prompt) // CHUNK_TOKENS for prompt in asked), asked[0])
        say(engine.ask("contract")["fields"])
        return
    loaded = [engine.generate(prompt) for prompt in asked]
    warm = [engine.generate(prompt) for prompt in asked]
    say(
        {
            "kernel": engine.ask("contract")["fields"]["kernel_layout"],
            "hits": sum(answer["kv"]["outcome"] == "hit" for answer in loaded),
            "loaded_tokens": sum(answer["kv"].get("loaded_tokens", 0) for answer in loaded),
            "local_first": sum(answer["kv"].get("local_tokens", 0) for answer in loaded),
            "local_second": sum(answer["kv"].get("local_tokens", 0) for answer in warm),
            "equal": sum(
                a["exact"] == b["exact"] and a["tokens"] == b["tokens"] for a, b in zip(loaded, warm, strict=True)
            ),
            "different_answers": len({tuple(answer["tokens"]) for answer in loaded}),
        }
    )


if __name__ == "__main__":
    main(*sys.argv[1:7])
