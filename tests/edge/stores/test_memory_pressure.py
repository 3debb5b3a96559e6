"""A cache in host memory near what the process may have: a cap that the validator allows holds under pressure, and one
that it refuses ends the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvrelay.core.sizing.memory import judge_memory

MIB = 1 << 20
ROOM_BYTES = 160 * MIB  # beyond what the process has when it begins, as a container's limit would leave
STORED = 400  # objects of 1 MiB: many times what fits

CHILD = """
import resource, sys
from kvrelay.edge.stores.tiered import ChunkShape, TieredStore
from tests.edge.stores.test_tiered import NAMESPACE

cap_bytes, room_bytes, count = map(int, sys.argv[1:])
size = 1 << 20
shape = ChunkShape(tokens=16, payload_bytes=size, layers=1, dtype="uint8", shape=(size,))
tier = {"url": "memory://", "bytes": cap_bytes}
store = TieredStore.open({"tiers": [tier], "deadline_ms": 5000, "break_even": False})
(has,) = (int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (has + room_bytes, has + room_bytes))
keys = [number.to_bytes(32, "big") for number in range(count)]
kept = sum(store.store(NAMESPACE, key, shape, [bytes([n % 256]) * size]).stored for n, key in enumerate(keys))
print(kept, store.report()["tiers"]["memory"]["used_bytes"], len(store.lookup(NAMESPACE, keys[-1:], shape).keys))
store.close()
"""


def filled(cap_bytes: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHILD, str(cap_bytes), str(ROOM_BYTES), str(STORED)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.covers("DR-16")
@pytest.mark.skipif(sys.platform != "linux", reason="limits of a process's memory are Linux's here")
def test_what_the_validator_allows_lives_under_pressure_and_what_it_refuses_does_not() -> None:
    small, large = 48 * MIB, 1024 * MIB
    assert judge_memory(host_bytes=ROOM_BYTES, engine_bytes=0, asked_bytes=small).safe
    assert not judge_memory(host_bytes=ROOM_BYTES, engine_bytes=0, asked_bytes=large).safe
    lived = filled(small)
    assert lived.returncode == 0, lived.stderr
    kept, used_bytes, newest = map(int, lived.stdout.split())
    assert (kept, newest) == (STORED, 1), "all were taken, and the newest is there"
    assert 0 < used_bytes <= small
    died = filled(large)
    assert died.returncode != 0 and "MemoryError" in died.stderr
