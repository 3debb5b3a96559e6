"""How much host memory a cache may take: what is there, less what the engine needs, less a buffer for all the rest."""

from __future__ import annotations

from msgspec import Struct

LEAST_BUFFER_SHARE = 0.1  # of the host, where nobody states a buffer: page cache, kernel, the engine's own peaks


class MemoryVerdict(Struct, frozen=True):
    """All in bytes. `safe` says whether the asked amount fits beside everything else."""

    host_bytes: float
    engine_bytes: float
    buffer_bytes: float
    asked_bytes: float

    @property
    def most_bytes(self) -> float:
        return max(0.0, self.host_bytes - self.engine_bytes - self.buffer_bytes)

    @property
    def safe(self) -> bool:
        return self.asked_bytes <= self.most_bytes


def judge_memory(
    *, host_bytes: float, engine_bytes: float, asked_bytes: float, buffer_bytes: float | None = None
) -> MemoryVerdict:
    """`buffer_bytes` None: a tenth of the host."""
    buffer = LEAST_BUFFER_SHARE * host_bytes if buffer_bytes is None else buffer_bytes
    return MemoryVerdict(host_bytes, engine_bytes, buffer, asked_bytes)
