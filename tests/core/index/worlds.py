"""Small worlds for index tests: chains of tokens, and the engine hashes that a worker would give their blocks."""

from __future__ import annotations

import numpy as np

from kvrelay.core.contract.keys import Keyer
from kvrelay.core.model.events import BlocksRemoved, BlocksStored
from kvrelay.core.model.units import Tier

KEYER = Keyer(b"test")
SIZE = 4


def block(number: int) -> np.ndarray:
    """The tokens of block `number`: equal numbers are equal blocks."""
    return np.arange(number * SIZE, (number + 1) * SIZE, dtype=np.uint32)


def tokens(chain) -> np.ndarray:
    return np.concatenate([block(n) for n in chain]) if len(chain) else np.zeros(0, dtype=np.uint32)


def keys(chain, **tags):
    return KEYER.prompt_keys(tokens(chain), SIZE, **tags)


def engine_hash(chain) -> int:
    """What some engine calls the last block of the chain. Unrelated to our keys, as in life."""
    return int(Keyer(b"engine").prompt_keys(tokens(chain), SIZE)[-1])


def stored(chain, *, after: int = 0, tier: Tier = Tier.GPU, with_tokens: bool = True, **tags) -> BlocksStored:
    """Blocks `after`.. of the chain become resident."""
    return BlocksStored(
        hashes=tuple(engine_hash(chain[: i + 1]) for i in range(after, len(chain))),
        parent=engine_hash(chain[:after]) if after else None,
        token_ids=tokens(chain[after:]) if with_tokens else None,
        block_size_tokens=SIZE,
        tier=tier,
        **tags,
    )


def removed(*chains, tier: Tier = Tier.GPU) -> BlocksRemoved:
    """The last block of each chain is gone."""
    return BlocksRemoved(tuple(engine_hash(chain) for chain in chains), tier)
