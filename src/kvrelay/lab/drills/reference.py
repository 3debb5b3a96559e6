"""What the right answer is: computed from the prompt alone, as by an engine that has never seen anything else.

The mock's text is a function of all tokens before it, of the weights and of what separates namespaces, so an answer
that was made with any foreign, stale or damaged KV differs from this one.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from kvrelay.core.engine.payload import PayloadModel
from kvrelay.core.model.prompt import TokenIds
from kvrelay.lab.drills.prompts import Text

MODEL = "mock-model"
BLOCK_TOKENS = 16
TOKEN_BYTES = 4


def weights(revision: str) -> str:
    """The name of what a mock computes with; clients see `MODEL` for all of them."""
    return f"{MODEL}@{revision}" if revision else MODEL


@lru_cache(maxsize=20_000)
def right_text(
    text: Text, max_tokens: int, revision: str, adapter: str | None, salt: str | None, as_ids: bool = True
) -> str:
    made = text_of(
        text.token_ids() if as_ids else _bytes_of(text), max_tokens, weights(revision), adapter, salt, BLOCK_TOKENS
    )
    return made.decode("latin-1")


def _bytes_of(text: Text) -> TokenIds:
    return np.frombuffer(text.letters().encode(), dtype=np.uint8).astype(np.uint32)


def chain_of(token_ids: TokenIds, model: str, adapter: str | None, salt: str | None, block_tokens: int) -> list[bytes]:
    """The payloads of all full blocks."""
    payloads = PayloadModel(model)
    payload, chain = payloads.root(adapter=adapter, salt=salt), []
    tokens, block_bytes = np.ascontiguousarray(token_ids, dtype="<u4").tobytes(), block_tokens * TOKEN_BYTES
    for at in range(0, len(tokens) // block_bytes * block_bytes, block_bytes):
        payload = payloads.block(payload, tokens[at : at + block_bytes])
        chain.append(payload)
    return chain


def text_of(
    token_ids: TokenIds, max_tokens: int, model: str, adapter: str | None, salt: str | None, block_tokens: int
) -> bytes:
    """The first `max_tokens` tokens of the answer, each of them one byte."""
    payloads = PayloadModel(model)
    payload = payloads.root(adapter=adapter, salt=salt)
    tokens = bytearray(np.ascontiguousarray(token_ids, dtype="<u4").tobytes())
    block_bytes, hashed, made = block_tokens * TOKEN_BYTES, 0, bytearray()
    for _ in range(max_tokens):
        while len(tokens) - hashed >= block_bytes:
            payload = payloads.block(payload, bytes(tokens[hashed : hashed + block_bytes]))
            hashed += block_bytes
        position = len(tokens) // TOKEN_BYTES
        token = payloads.next_token(payload, b"", bytes(tokens[hashed:]), position=position, variant=0)
        tokens += token.to_bytes(TOKEN_BYTES, "little")
        made.append(token)
    return bytes(made)


def tenant_key(tenant: str) -> str:
    """The credential by which a drill's tenant is known."""
    return f"key-of-{tenant}"


def tenant_salt(tenant: str | None) -> str | None:
    """What the gateway is told to separate its KV by."""
    return None if tenant is None else f"salt-of-{tenant}"


def salt_of(epoch: str | None, tenant: str | None = None) -> str | None:
    """The salt of a request in this epoch."""
    own = tenant_salt(tenant)
    return own if epoch in (None, "0") else f"{own or ''}~epoch-{epoch}"
