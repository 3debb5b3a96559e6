"""The text of a mock worker that nothing disturbs: a function of the tokens before, and of nothing else."""

from __future__ import annotations

import numpy as np

from kvrelay.core.engine.payload import PayloadModel
from kvrelay.core.engine.sequence import TOKEN_BYTES
from kvrelay.core.model.prompt import TokenIds


def undisturbed_text(prompt: TokenIds, tokens: int, *, model: str, block_size_tokens: int) -> str:
    """`tokens` tokens (one letter each) behind `prompt`, as `core/engine` would compute them."""
    weights = PayloadModel(model)
    payload = weights.root(adapter=None, salt=None)
    tail = np.ascontiguousarray(prompt, dtype="<u4").tobytes()
    block_bytes = block_size_tokens * TOKEN_BYTES
    said = bytearray()
    for position in range(len(prompt), len(prompt) + tokens):
        while len(tail) >= block_bytes:
            payload = weights.block(payload, tail[:block_bytes])
            tail = tail[block_bytes:]
        token_id = weights.next_token(payload, b"", tail, position=position, variant=0)
        said.append(token_id)
        tail += token_id.to_bytes(TOKEN_BYTES, "little")
    return said.decode()
