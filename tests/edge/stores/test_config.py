"""Options of a store that cannot be used: what was given, from where, what is legal, and the nearest of it."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.edge.stores.config import StoreConfig, StoreConfigError

TIER = {"url": "memory://"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tiers": [TIER], "cypher": "x"}, ["cypher", "legal: tiers, failure_policy", "did you mean `cipher`?"]),
        ({"tiers": [TIER], "cipher": "aegis-256"}, ["'aegis-256'", "$.cipher", "legal: aes-256-gcm, aegis-256x2"]),
        ({"tiers": [TIER], "failure_policy": "recompite"}, ["legal: recompute, fail, fallback", "`recompute`?"]),
        ({"tiers": [TIER | {"evict": "lru"}]}, ["`evict`", "legal: url, kind", "did you mean `eviction`?"]),
        ({"tiers": [TIER | {"eviction": "lrn"}]}, ["$.tiers[0].eviction", "legal: lru, ", "did you mean `lru`?"]),
        ({"tiers": [TIER | {"kind": "valkey"}]}, ["tier `memory://` is no `valkey` store"]),
        ({"tiers": [TIER], "deadline_ms": "x"}, ["Expected `float`, got `str`", "$.deadline_ms"]),
        ({}, ["missing required field `tiers`"]),
    ],
)
def test_a_wrong_option_is_named_with_what_is_legal(given: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(StoreConfigError) as refused:
        StoreConfig.from_mapping(given, source="the connector's options")
    assert all(part in str(refused.value) for part in [*said, "from the connector's options"]), refused.value
