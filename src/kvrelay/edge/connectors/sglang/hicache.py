"""SGLang's HiCache as an arm of an experiment: its flags, and whether the host has the memory for it.

Names, legal values and the arithmetic are those of SGLang 0.5.23: the pool in host memory has `ratio` times the tokens
of the device's pool, rounded up to whole pages and one page more, for each rank; what is free is counted less a reserve
of 10 GiB, and a pool that does not fit ends the server at its start. Better to know before.
"""

from __future__ import annotations

from msgspec import Struct

IO_BACKENDS = ("kernel", "direct", "kernel_ascend")
WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
STORAGE_BACKENDS = ("file", "mooncake", "hf3fs", "nixl", "aibrix")
RESERVE_BYTES = 10 * 2**30


class HiCache(Struct, frozen=True, kw_only=True):
    """Where to start from, and no general best. `storage`: None is the host tier alone."""

    page_size: int = 64
    ratio: float = 2.0
    io_backend: str = "kernel"
    write_policy: str = "write_through"
    storage: str | None = None

    def problems(self) -> tuple[tuple[str, object, str], ...]:
        """(member, value, what would be legal) of everything that SGLang would refuse or that cannot help."""
        checks: tuple[tuple[str, object, bool, str], ...] = (
            ("page_size", self.page_size, self.page_size >= 1, "at least 1 token"),
            (
                "ratio",
                self.ratio,
                self.ratio > 1,
                "above 1, or it holds no more than the device",
            ),
            ("io_backend", self.io_backend, self.io_backend in IO_BACKENDS, ", ".join(IO_BACKENDS)),
            ("write_policy", self.write_policy, self.write_policy in WRITE_POLICIES, ", ".join(WRITE_POLICIES)),
            ("storage", self.storage, self.storage in (None, *STORAGE_BACKENDS), ", ".join(STORAGE_BACKENDS)),
        )
        return tuple((name, value, legal) for name, value, is_good, legal in checks if not is_good)


class HostRam(Struct, frozen=True):
    """All in bytes. `needed` is of all ranks on the host."""

    needed_bytes: int
    free_bytes: int
    reserve_bytes: int

    @property
    def usable_bytes(self) -> int:
        return max(0, self.free_bytes - self.reserve_bytes)

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.usable_bytes


def flags(cache: HiCache) -> tuple[str, ...]:
    """For `python -m sglang.launch_server`."""
    made = (
        "--page-size", str(cache.page_size),
        "--enable-hierarchical-cache",
        "--hicache-ratio", f"{cache.ratio:g}",
        "--hicache-io-backend", cache.io_backend,
        "--hicache-write-policy", cache.write_policy,
    )  # fmt: skip
    return made if cache.storage is None else (*made, "--hicache-storage-backend", cache.storage)


def host_ram(
    cache: HiCache,
    *,
    device_pool_tokens: int,
    kv_bytes_per_token: float,
    ranks: int,
    free_bytes: int,
    reserve_bytes: int = RESERVE_BYTES,
) -> HostRam:
    """`device_pool_tokens` and `kv_bytes_per_token` are of one rank: `max_total_num_tokens` in its log, and what a
    token takes of its share of the KV heads."""
    pages = int(device_pool_tokens * cache.ratio) // cache.page_size + 1
    pool_bytes = round(pages * cache.page_size * kv_bytes_per_token)
    return HostRam(ranks * pool_bytes, free_bytes, reserve_bytes)
