"""Token ids as text: one made-up word per id, and different ids always give different words.

For targets that take text only (chat, other routers). The words mean nothing and come from nobody's prompts. How many
tokens a text has for an engine depends on that engine's tokenizer, so lengths in tokens are kept only roughly.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from kvrelay.core.model.prompt import TokenIds

_SYLLABLES = tuple(consonant + vowel for consonant in "bdfghjklmnprstvz" for vowel in "aeiou")
_BASE = len(_SYLLABLES)


def text_of(token_ids: TokenIds) -> str:
    """Words of whole syllables, a space after each: two blocks of equal length are equal texts only if equal ids."""
    return "".join(map(_word, np.asarray(token_ids).tolist()))


@lru_cache(maxsize=1 << 17)
def _word(token_id: int) -> str:
    """The id in base 80 with a space behind it; every word has at least two syllables."""
    syllables: list[str] = []
    while token_id or len(syllables) < 2:
        token_id, digit = divmod(token_id, _BASE)
        syllables.append(_SYLLABLES[digit])
    return "".join(syllables) + " "
