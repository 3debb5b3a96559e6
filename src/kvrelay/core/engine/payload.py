"""The verifiable stand-in for KV data, and the model that reads it.

A real KV block is a function of the weights and of every token before it. So is a payload: a digest chained over the
parent's payload, the block's tokens and what separates namespaces (model, adapter, salt). It is on purpose not the
look-up hash: a block found under the right hash with the wrong payload is exactly what a mock exists to reveal.

The next token is a function of the payloads that the engine really reads, of the tail that lies in no full block yet,
and of nothing else. Right KV gives the same text with and without a hit; wrong KV gives other text.
"""

from __future__ import annotations

import hashlib

PAYLOAD_BYTES = 16
_LETTERS = b"etaoin shrdlu cmfwyp vbgkq "


class PayloadModel:
    """The "weights": two models with different names never agree on a payload."""

    def __init__(self, model: str) -> None:
        self._model = model.encode()

    def root(self, *, adapter: str | None, salt: str | None) -> bytes:
        """The payload "before the first block"."""
        tagged = [b"model", self._model]
        if adapter is not None:
            tagged += [b"adapter", adapter.encode()]
        if salt is not None:
            tagged += [b"salt", salt.encode()]
        framed = b"".join(len(part).to_bytes(4, "big") + part for part in tagged)
        return hashlib.blake2b(framed, digest_size=PAYLOAD_BYTES).digest()

    def block(self, parent: bytes, token_bytes: bytes, taint: bytes = b"") -> bytes:
        """The payload that computing one block writes; `taint` stands for wrong blocks read on the way."""
        return hashlib.blake2b(parent + token_bytes + taint, digest_size=PAYLOAD_BYTES).digest()

    def read_wrong(self, taint: bytes, payload: bytes, position: int) -> bytes:
        """What attention has picked up after reading one more payload that should not be there."""
        return hashlib.blake2b(taint + payload + position.to_bytes(4, "big"), digest_size=PAYLOAD_BYTES).digest()

    def corrupt(self, payload: bytes) -> bytes:
        """Another payload of the same size."""
        return hashlib.blake2b(payload, digest_size=PAYLOAD_BYTES, person=b"corrupt").digest()

    def next_token(self, payload: bytes, taint: bytes, tail_bytes: bytes, *, position: int, variant: int) -> int:
        """One byte of lower-case text. `variant` tells the `n` samples of one prompt apart."""
        place = position.to_bytes(4, "big") + variant.to_bytes(4, "big")
        digest = hashlib.blake2b(payload + taint + place + tail_bytes, digest_size=2).digest()
        return _LETTERS[int.from_bytes(digest, "big") % len(_LETTERS)]
