"""HiCache's flags and the memory that they ask for."""

from __future__ import annotations

import pytest

from kvrelay.edge.connectors.sglang.hicache import HiCache, flags, host_ram
from kvrelay.edge.connectors.tiering import HICACHE, implementations

GIB = 2**30


@pytest.mark.covers("TR-10")
def test_the_flags_of_the_starting_point() -> None:
    assert " ".join(flags(HiCache())) == (
        "--page-size 64 --enable-hierarchical-cache --hicache-ratio 2 --hicache-io-backend kernel "
        "--hicache-write-policy write_through"
    )
    assert flags(HiCache(storage="mooncake"))[-2:] == ("--hicache-storage-backend", "mooncake")
    assert implementations(flags(HiCache())) == (HICACHE,)


@pytest.mark.covers("TR-10")
def test_need_against_what_is_free_with_the_reserve_taken_off() -> None:
    """100,000 tokens twice, in pages of 64 and one page more, at 128 KiB, on two ranks."""
    free = 64 * GIB
    ram = host_ram(HiCache(), device_pool_tokens=100_000, kv_bytes_per_token=131_072, ranks=2, free_bytes=free)

    assert ram.needed_bytes == 2 * (200_000 // 64 + 1) * 64 * 131_072
    assert ram.usable_bytes == 54 * GIB and ram.fits
    tight = host_ram(HiCache(), device_pool_tokens=100_000, kv_bytes_per_token=131_072, ranks=2, free_bytes=58 * GIB)
    assert not tight.fits
    assert host_ram(HiCache(), device_pool_tokens=1, kv_bytes_per_token=1, ranks=1, free_bytes=GIB).usable_bytes == 0


@pytest.mark.covers("TR-10")
@pytest.mark.parametrize(
    ("cache", "member"),
    [
        (HiCache(ratio=1.0), "ratio"),
        (HiCache(io_backend="kernal"), "io_backend"),
        (HiCache(write_policy="through"), "write_policy"),
        (HiCache(storage="redis"), "storage"),
        (HiCache(page_size=0), "page_size"),
    ],
)
def test_what_the_server_would_refuse_is_named_before(cache: HiCache, member: str) -> None:
    assert [name for name, _, _ in cache.problems()] == [member]
