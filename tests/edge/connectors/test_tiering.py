"""Told from its arguments: which implementation of tiers a worker is started with, and that there is only one."""

from __future__ import annotations

import json

import pytest

from kvrelay.edge.connectors.tiering import HICACHE, LMCACHE, OFFLOADING, OURS, OneTierOnly, implementations, one_only


def transfer(*names: str) -> str:
    if len(names) == 1:
        return json.dumps({"kv_connector": names[0], "kv_role": "kv_both"})
    inner = [{"kv_connector": name} for name in names]
    return json.dumps({"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": inner}})


@pytest.mark.covers("TR-09")
@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((), ()),
        (("--page-size", "64", "--enable-prefix-caching"), ()),
        (("--enable-hierarchical-cache", "--hicache-ratio", "2"), (HICACHE,)),
        (("--enable-hicache",), (HICACHE,)),
        (("--enable-lmcache", "--lmcache-config-file", "x.yaml"), (LMCACHE,)),
        (("--enable-hierarchical-cache", "--enable-lmcache"), (HICACHE, LMCACHE)),
        (("--kv-transfer-config", transfer("LMCacheConnectorV1")), (LMCACHE,)),
        ((f"--kv_transfer_config={transfer('LMCacheMPConnector')}",), (LMCACHE,)),
        (("--kv-transfer-config", transfer("KvrelayConnector")), (OURS,)),
        (("--kv-transfer-config", transfer("KvrelayConnector", "LMCacheConnectorV1")), (OURS, LMCACHE)),
        (("--kv-transfer-config", transfer("NixlConnector")), ()),
        (("--kv-offloading-size", "8"), (OFFLOADING,)),
        (("--kv-offloading-size", "8", "--kv-offloading-backend", "lmcache"), (LMCACHE,)),
        (("--kv-transfer-config", "{broken"), ()),
    ],
)
def test_all_that_are_on(args: tuple[str, ...], expected: tuple[str, ...]) -> None:
    assert implementations(args) == expected


@pytest.mark.covers("TR-09")
def test_two_are_refused_by_name_and_a_store_of_ours_counts() -> None:
    assert one_only(("--enable-lmcache",), where="arm a") == LMCACHE
    with pytest.raises(OneTierOnly, match="arm a has HiCache and LMCache on at once"):
        one_only(("--enable-hierarchical-cache", "--enable-lmcache"), where="arm a")
    with pytest.raises(OneTierOnly, match="kvrelay store and HiCache"):
        one_only(("--enable-hierarchical-cache",), has_store=True, where="arm b")
