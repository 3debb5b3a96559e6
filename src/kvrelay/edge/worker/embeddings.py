"""/v1/embeddings: a vector that is a function of the tokens. The engine has no part in it."""

from __future__ import annotations

from base64 import b64encode
from hashlib import blake2b
from typing import Any

import numpy as np
from msgspec import Struct

from kvrelay.core.model.prompt import TokenIds
from kvrelay.edge.http.server import Exchange
from kvrelay.edge.worker import answers
from kvrelay.edge.worker.answers import RequestError
from kvrelay.edge.worker.generation import adapter_of, check_vocabulary, decode_body, read_prompts
from kvrelay.edge.worker.spec import MockSpec

DEFAULT_DIMENSIONS = 16  # floats
MAX_DIMENSIONS = 4096


class _Body(Struct):
    input: Any = None
    model: str | None = None
    encoding_format: str = "float"
    dimensions: int | None = None


def embed(exchange: Exchange, spec: MockSpec) -> None:
    received = decode_body(exchange.body, _Body)
    adapter_of(received.model, spec)
    prompts = read_prompts(received.input, name="input")
    check_vocabulary(prompts, spec)
    size = DEFAULT_DIMENSIONS if received.dimensions is None else received.dimensions
    if not 1 <= size <= MAX_DIMENSIONS:
        raise RequestError(400, f"`dimensions` is {size}; legal: 1..{MAX_DIMENSIONS}", param="dimensions")
    if received.encoding_format not in ("float", "base64"):
        message = f"`encoding_format` is `{received.encoding_format}`; legal: `float`, `base64`"
        raise RequestError(400, message, param="encoding_format")
    vectors = [_vector(prompt, size) for prompt in prompts]
    as_text = received.encoding_format == "base64"
    tokens = sum(map(len, prompts))
    body = {
        "object": "list",
        "model": received.model or spec.model,
        "data": [
            {"object": "embedding", "index": index, "embedding": _base64(each) if as_text else each.tolist()}
            for index, each in enumerate(vectors)
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    answers.respond_json(exchange, body)


def _vector(prompt: TokenIds, size: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """`size` floats of length 1, drawn from a digest of the tokens."""
    digest = blake2b(np.ascontiguousarray(prompt, dtype="<u4").tobytes(), digest_size=8).digest()
    drawn = np.random.default_rng(int.from_bytes(digest, "big")).standard_normal(size)
    return (drawn / np.linalg.norm(drawn)).astype("<f4")


def _base64(vector: np.ndarray[Any, np.dtype[np.float32]]) -> str:
    return b64encode(vector.tobytes()).decode()
