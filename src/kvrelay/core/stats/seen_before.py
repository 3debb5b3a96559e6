"""The counterfactual behind the word "recomputed": how much of a prompt had been computed before, anywhere.

A miss is not yet a waste: the first prompt of a session has to be computed by somebody. Only tokens that an earlier
prompt of the same run already contained, in the same chain, could have been hit by a perfect fleet without bounds.
"""

from __future__ import annotations

from kvrelay.core.contract.keys import Keyer
from kvrelay.core.model.prompt import TokenIds


class SeenBefore:
    """Fed with prompts in the order in which they were sent."""

    def __init__(self, block_size_tokens: int) -> None:
        self._block_size_tokens = block_size_tokens
        self._keyer = Keyer(b"seen-before")
        self._seen: set[int] = set()

    def take(self, token_ids: TokenIds) -> int:
        """Tokens of this prompt's longest prefix of full blocks that was in an earlier one; then remembers it.

        At least one token of a prompt is always computed, so a prompt of whole blocks can have one block less.
        """
        keys = self._keyer.prompt_keys(token_ids, self._block_size_tokens).tolist()
        depth = 0
        while depth < len(keys) and keys[depth] in self._seen:
            depth += 1
        self._seen.update(keys)
        most_blocks = (len(token_ids) - 1) // self._block_size_tokens
        return min(depth, most_blocks) * self._block_size_tokens
