"""One request inside the engine: its tokens, its blocks and how far it is computed."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from kvrelay.core.engine.blockpool import Block
from kvrelay.core.model.prompt import TokenIds

TOKEN_BYTES = 4


class EngineRequest(Struct, frozen=True, eq=False):
    """A prompt to be completed. `variant` tells the `n` samples of one prompt apart."""

    request_id: str
    token_ids: TokenIds
    max_tokens: int
    adapter: str | None = None
    salt: str | None = None
    variant: int = 0
    natural_end: bool = False  # the model would stop by itself at `max_tokens`


class Sequence:
    """State of one admitted or waiting request. Tokens are kept as little-endian bytes, ready for hashing."""

    __slots__ = (
        "admitted_s",
        "arrived_s",
        "blocks",
        "cached_tokens",
        "computed_tokens",
        "ended",
        "expected_payloads",
        "first_token_s",
        "named_blocks",
        "names",
        "output_tokens",
        "preemptions",
        "request",
        "root_payload",
        "taint",
        "token_bytes",
        "total_tokens",
        "wrong_reuse_blocks",
    )

    def __init__(self, request: EngineRequest, *, arrived_s: float, names: list[int], root_payload: bytes) -> None:
        self.request = request
        self.token_bytes = bytearray(np.ascontiguousarray(request.token_ids, dtype="<u4").tobytes())
        self.total_tokens = len(request.token_ids)
        self.output_tokens = 0
        self.computed_tokens = 0
        self.blocks: list[Block] = []
        self.named_blocks = 0
        self.names = names
        self.root_payload = root_payload
        self.expected_payloads: list[bytes] = []
        self.taint = b""
        self.cached_tokens = 0
        self.wrong_reuse_blocks = 0
        self.preemptions = 0
        self.arrived_s = arrived_s
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.ended = False

    @property
    def prompt_tokens(self) -> int:
        return self.total_tokens - self.output_tokens

    @property
    def tokens_to_compute(self) -> int:
        return self.total_tokens - self.computed_tokens

    @property
    def decoding(self) -> bool:
        """Only the token sampled last is not computed yet."""
        return self.output_tokens > 0 and self.total_tokens - self.computed_tokens == 1

    def append(self, token_id: int) -> None:
        self.token_bytes += token_id.to_bytes(TOKEN_BYTES, "little")
        self.total_tokens += 1
        self.output_tokens += 1

    def slice_bytes(self, start_token: int, end_token: int) -> bytes:
        return bytes(self.token_bytes[start_token * TOKEN_BYTES : end_token * TOKEN_BYTES])

    def slice_ids(self, start_token: int, end_token: int) -> TokenIds:
        return np.frombuffer(self.slice_bytes(start_token, end_token), dtype="<u4")
